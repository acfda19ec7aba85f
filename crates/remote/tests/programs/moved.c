/* On SIGUSR1 it moves the code of the hooked function into memory that is no file's, as programs do that want large pages. Ends on SIGTERM and
 * prints OK. */
#define _GNU_SOURCE
#include "hooked.h"
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096 };

static volatile sig_atomic_t stop, move;

static void on_signal(int signal) { *(signal == SIGTERM ? &stop : &move) = 1; }

int main(void) {
  signal(SIGTERM, on_signal), signal(SIGUSR1, on_signal);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  for (long n = 0; !stop; n++) {
    if (hooked(n) != 3 * n + 7) return 3;
    if (n % 64 == 0) usleep(200);
    if (!move) continue;
    move = 0;
    void *at = (void *)((uintptr_t)hooked & -(uintptr_t)PAGE);
    char *copy = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(copy, at, PAGE);
    if (mprotect(copy, PAGE, PROT_READ | PROT_EXEC)) return 4;
    if (mremap(copy, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at) return 5;
    printf("MOVED\n"), fflush(stdout);
  }
  printf("OK\n"), fflush(stdout);
  return 0;
}
