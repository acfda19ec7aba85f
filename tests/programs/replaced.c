/* STAGES SEED: each stage makes some thousand calls a second for 0.1 to 1.2 s and replaces itself by the next one; the last one waits
 * for a line. Prints "READY pid" at first, and at last "SUM CALLS BYTES" over all stages. Nothing else allocates. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char text[256];

static void say(const char *words) {
  if (write(1, words, strlen(words)) < 0) _exit(98);
}

static void wait_line(void) {
  char c = 0;
  while (c != '\n' && read(0, &c, 1) > 0) {}
}

int main(int argc, char **argv) {
  uint64_t number[4] = {0}; /* Stages, seed, calls and bytes so far. */
  for (int i = 0; i < 4 && i + 1 < argc; i++) number[i] = strtoull(argv[i + 1], 0, 10);
  uint64_t stages = number[0], seed = number[1], calls = number[2], bytes = number[3];
  if (argc < 4) {
    snprintf(text, sizeof text, "READY %d\n", getpid());
    say(text);
    wait_line();
  }
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  for (uint64_t rounds = 20 + (seed >> 33) % 220; rounds > 0; rounds--) {
    for (uint64_t i = 0; i < 50; i++) {
      size_t n = 16 + (calls * 40) % 4000;
      void *p = malloc(n);
      __asm__ volatile("" : "+r"(p) : : "memory");
      calls++;
      bytes += n;
      free(p);
    }
    usleep(5000);
  }
  if (stages > 1) {
    char words[4][24];
    uint64_t next[4] = {stages - 1, seed, calls, bytes};
    for (int i = 0; i < 4; i++) snprintf(words[i], sizeof words[i], "%llu", (unsigned long long)next[i]);
    execl(argv[0], argv[0], words[0], words[1], words[2], words[3], (char *)0);
    _exit(97);
  }
  snprintf(text, sizeof text, "SUM %llu %llu\n", (unsigned long long)calls, (unsigned long long)bytes);
  say(text);
  wait_line();
  return 0;
}
