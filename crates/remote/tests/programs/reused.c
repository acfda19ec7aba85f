/* A process one of whose threads ends, and a child that gets this thread's id. reused. On a line of input, that happens; then
 * READY is printed again. Ends on SIGTERM and prints OK if the child was right to the end. */
#define _GNU_SOURCE
#include "hooked.h"
#include <linux/sched.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t stop, ended;
static atomic_int other;

static void on_term(int signal) { (void)signal, stop = 1; }

static void *ending(void *argument) {
  (void)argument;
  atomic_store(&other, (int)syscall(SYS_gettid));
  while (!ended) usleep(1000);
  return 0;
}

static void work(void) {
  long n = 0;
  while (!stop)
    for (int i = 0; i < 1000; i++, n++)
      if (hooked(n) != 3 * n + 7) _exit(3);
}

int main(void) {
  struct sigaction action = {.sa_handler = on_term};
  sigaction(SIGTERM, &action, 0);
  pthread_t thread;
  pthread_create(&thread, 0, ending, 0);
  while (!atomic_load(&other)) usleep(1000);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  char line[8];
  if (!fgets(line, sizeof line, stdin)) return 1;
  ended = 1;
  pthread_join(thread, 0);
  pid_t wanted = atomic_load(&other), child = -1;
  struct clone_args how = {.exit_signal = SIGCHLD, .set_tid = (uintptr_t)&wanted, .set_tid_size = 1};
  for (int tries = 0; child < 0 && tries < 1000; tries++) {
    child = syscall(SYS_clone3, &how, sizeof how);
    if (child < 0) usleep(1000);
  }
  if (!child) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    work();
    _exit(0);
  }
  if (child != wanted) return 1;
  printf("READY %x\n", child), fflush(stdout);
  while (!stop) usleep(10000);
  kill(child, SIGTERM);
  int status = -1;
  waitpid(child, &status, 0);
  if (status) return 3;
  printf("OK\n"), fflush(stdout);
  return 0;
}
