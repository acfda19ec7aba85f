/* A thread starts a process that runs in the same memory. Ends on SIGTERM and prints OK.
 * sharing CHILDREN [FLAGS]: after so many children that do not; with these flags of clone(2), without CLONE_VM if it is among them. */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static volatile int child;
static int flags;

static void on_term(int signal) { (void)signal, stop = 1; }

static int share(void *argument) {
  (void)argument;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (long n = 0;; n++)
    if (hooked(n) != 3 * n + 7) syscall(SYS_exit, 3);
}

static void *start(void *argument) {
  (void)argument;
  child = clone(share, (char *)malloc(1 << 16) + (1 << 16), (CLONE_VM | SIGCHLD) ^ flags, 0);
  while (!stop) usleep(10000);
  return 0;
}

int main(int count, char **arguments) {
  for (int children = count > 1 ? atoi(arguments[1]) : 0; children; children--)
    if (!fork()) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
  flags = count > 2 ? strtol(arguments[2], 0, 0) : 0;
  signal(SIGTERM, on_term);
  pthread_t thread;
  pthread_create(&thread, 0, start, 0);
  while (!child) usleep(1000);
  if (child < 0) return 1;
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  pthread_join(thread, 0);
  kill(child, SIGKILL);
  printf("OK\n"), fflush(stdout);
  return 0;
}
