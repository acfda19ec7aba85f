/* PREFIX NUMBER MODULES POOL: loads MODULES of the libraries PREFIX0.so … (a choice by NUMBER), prints READY, waits for a
 * line, allocates through each of them 200 times in about four seconds, and then idles. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
enum { MOST = 256 };
static void *(*take[MOST])(size_t);
int main(int argc, char **argv) {
  if (argc < 5) return 2;
  int number = atoi(argv[2]), modules = atoi(argv[3]), pool = atoi(argv[4]);
  if (modules > MOST || pool < 1) return 2;
  for (int k = 0; k < modules; k++) {
    int which = (number + k * (1 + number % 2)) % pool;
    char path[4096], name[32];
    snprintf(path, sizeof path, "%s%d.so", argv[1], which);
    snprintf(name, sizeof name, "take_%d", which);
    void *library = dlopen(path, RTLD_NOW);
    take[k] = library ? (void *(*)(size_t))dlsym(library, name) : 0;
    if (!take[k]) return 3;
  }
  puts("READY");
  fflush(stdout);
  char c;
  if (read(0, &c, 1) < 0) return 4;
  for (int round = 0; round < 200; round++)
    for (int k = 0; k < modules; k++) {
      void *p = take[k](8000 + 100 * (size_t)k);
      __asm__ volatile("" : "+r"(p) : : "memory");
      if (round % 8) free(p);
      if (k == 0) usleep(20000);
    }
  for (;;) pause();
}
