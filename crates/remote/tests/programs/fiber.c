/* A fiber that a signal's handler switches away from wherever the signal found it. Calls nothing but the hooked function there. Once that
 * is neither the program's own code nor a library's, which a hook makes it be, it prints ASLEEP, and the fiber is on no thread's stack
 * until SIGUSR1. Ends on SIGTERM and prints OK. */
#define _GNU_SOURCE
#include "hooked.h"
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

static ucontext_t first, fiber;
static volatile sig_atomic_t stop, is_in_fiber, was_asleep, is_woken;
static volatile long calls;
static void on_term(int signal) { (void)signal, stop = 1; }
static void on_wake(int signal) { (void)signal, is_woken = 1; }
static void on_alarm(int signal, siginfo_t *info, void *context) {
  extern char __executable_start, etext;
  char *at = (char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  (void)signal, (void)info;
  if (!is_in_fiber || was_asleep || (at >= &__executable_start && at < &etext)) return;
  was_asleep = 1, is_in_fiber = 0;
  swapcontext(&fiber, &first);
}
static void in_fiber(void) {
  is_in_fiber = 1;
  for (long i = 0; !stop; i++, calls++)
    if (hooked(i) != 3 * i + 7) _exit(3);
  is_in_fiber = 0;
}

int main(void) {
  struct sigaction action = {.sa_sigaction = on_alarm, .sa_flags = SA_RESTART | SA_SIGINFO};
  sigaction(SIGALRM, &action, 0);
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_term, sigaction(SIGTERM, &action, 0);
  action.sa_handler = on_wake, sigaction(SIGUSR1, &action, 0);
  getcontext(&fiber);
  fiber.uc_stack.ss_sp = malloc(1 << 17), fiber.uc_stack.ss_size = 1 << 17, fiber.uc_link = &first;
  makecontext(&fiber, in_fiber, 0);
  struct itimerval timer = {{0, 500}, {0, 500}};
  setitimer(ITIMER_REAL, &timer, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  swapcontext(&first, &fiber);
  if (was_asleep) {
    printf("ASLEEP\n"), fflush(stdout);
    while (!is_woken) usleep(1000);
    swapcontext(&first, &fiber);
  }
  printf("OK calls %ld\n", calls), fflush(stdout);
  return 0;
}
