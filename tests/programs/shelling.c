/* COMMANDS: runs that many programs as a shell does, by vfork; each child allocates before its exec, and leaves a block to its parent.
 * Prints "READY pid", waits for a line, and prints "SUM CALLS BYTES CALLS BYTES": its own, and those of the children before their
 * execs. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char text[256];
static volatile uint64_t calls[2], bytes[2];
static volatile int who;

static void say(const char *words) {
  if (write(1, words, strlen(words)) < 0) _exit(98);
}

static void wait_line(void) {
  char c = 0;
  while (c != '\n' && read(0, &c, 1) > 0) {}
}

static __attribute__((noinline)) void *take(size_t n) {
  void *p = malloc(n);
  __asm__ volatile("" : "+r"(p) : : "memory");
  calls[who]++;
  bytes[who] += n;
  return p;
}

int main(int argc, char **argv) {
  uint64_t commands = argc > 1 ? strtoull(argv[1], 0, 10) : 10;
  snprintf(text, sizeof text, "READY %d\n", getpid());
  say(text);
  wait_line();
  for (uint64_t i = 0; i < commands; i++) {
    for (uint64_t k = 0; k < 20; k++) free(take(100 + k));
    void *volatile left = 0;
    pid_t child = vfork();
    if (child == 0) {
      who = 1;
      left = take(1000 + i);
      for (uint64_t k = 0; k < 10; k++) free(take(3000 + k));
      if (i % 2) _exit(0);
      execl("/bin/true", "true", (char *)0);
      _exit(97);
    }
    who = 0;
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status) _exit(99);
    free(left);
  }
  unsigned long long sums[4] = {calls[0], bytes[0], calls[1], bytes[1]};
  snprintf(text, sizeof text, "SUM %llu %llu %llu %llu\n", sums[0], sums[1], sums[2], sums[3]);
  say(text);
  wait_line();
  return 0;
}
