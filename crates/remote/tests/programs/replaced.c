/* A process that a thread other than the first replaces by itself (exec), again and again, at the same addresses. replaced
 * MICROSECONDS: at most that long after its start, the first time after it was told to. Exits with 3 if a thread comes to harm; ends with its parent. */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* Arguments, and bytes of each: nearly as many as the kernel takes. */
#define COUNT 40
#define LENGTH (128 << 10)

static char *micros;
static int is_first;

static void *work(void *argument) {
  (void)argument;
  for (long n = 0;; n++)
    if (hooked(n) != 3 * n + 7) _exit(3);
}

static void *replacing(void *argument) {
  (void)argument;
  char told;
  if (is_first && read(0, &told, 1) != 1) _exit(5);
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  usleep(now.tv_nsec / 1000 % atol(micros));
  /* The kernel takes some milliseconds to copy the arguments, and only then ends the other threads. */
  static char filling[LENGTH];
  static char *arguments[COUNT + 4] = {"replaced", 0, "again"};
  arguments[1] = micros;
  memset(filling, 'x', LENGTH - 1);
  for (int i = 0; i < COUNT; i++) arguments[3 + i] = filling;
  execv("/proc/self/exe", arguments);
  _exit(4);
}

int main(int count, char **arguments) {
  micros = arguments[1];
  if (!(personality(0xffffffff) & ADDR_NO_RANDOMIZE)) {
    personality(ADDR_NO_RANDOMIZE);
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_STACK, &limit);
    execl("/proc/self/exe", "replaced", micros, (char *)0);
    return 4;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  is_first = count == 2;
  if (is_first) printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  pthread_t thread;
  pthread_create(&thread, 0, work, 0);
  pthread_create(&thread, 0, replacing, 0);
  work(0);
}
