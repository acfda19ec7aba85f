/* Calls nothing but the hooked function, and is interrupted by a signal whose handler sleeps for half of the time: some handlers
 * return into the instructions that a hook displaces. handlers [alternate]: on an alternate stack. */
#include "hooked.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static volatile unsigned long handled;
static void on_term(int signal) { (void)signal, stop = 1; }
static void on_alarm(int signal) {
  (void)signal, handled++;
  usleep(2000);
}

int main(int count, char **arguments) {
  (void)arguments;
  stack_t alternate = {.ss_sp = malloc(1 << 17), .ss_size = 1 << 17};
  if (count > 1) sigaltstack(&alternate, 0);
  struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART | (count > 1 ? SA_ONSTACK : 0)};
  sigaction(SIGALRM, &action, 0);
  action.sa_handler = on_term, sigaction(SIGTERM, &action, 0);
  struct itimerval timer = {{0, 5000}, {0, 5000}};
  setitimer(ITIMER_REAL, &timer, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  long i = 0;
  for (; !stop; i++) if (hooked(i) != 3 * i + 7) return 3;
  printf("OK calls %ld handled %lu\n", i, handled), fflush(stdout);
  return 0;
}
