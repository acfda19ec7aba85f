/* Eight threads that check all that a stop could harm: results of the hooked function, heap blocks, vector registers, signal
 * masks, the alternate stack. Signals at 1 kHz, whose handler takes its time, and forks. Ends on SIGTERM and prints OK and the
 * number of calls of the hooked function, or the first harm.
 * torture [threads [forks: 0 or 1 [pause after each round, microseconds]]] */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static int pause_us;
static atomic_ulong calls, ticks, forks;
static double reference;

static void harm(const char *what) {
  fprintf(stderr, "HARM %s\n", what);
  fflush(stderr);
  _exit(3);
}

static long checked(long x) {
  long y = hooked(x);
  if (y != 3 * x + 7) harm("result");
  return y;
}

static double vectors(void) {
  double a = 1, b = 2, c = 3, d = 4;
  for (int i = 0; i < 300; i++) {
    a = a * 1.0000001 + b * 1e-9, b = b * 0.9999999 + c * 1e-9;
    c = c * 1.0000003 + d * 1e-9, d = d * 0.9999997 + a * 1e-9;
  }
  return a + b + c + d;
}

static void on_alarm(int signal) {
  (void)signal;
  unsigned long n = 0;
  for (int i = 0; i < 2000; i++) checked(i), n++;
  atomic_fetch_add(&ticks, 1);
  atomic_fetch_add(&calls, n);
}

static void on_term(int signal) { (void)signal, stop = 1; }

static void *work(void *argument) {
  uintptr_t number = (uintptr_t)argument;
  stack_t alternate = {.ss_sp = malloc(1 << 17), .ss_size = 1 << 17}, now;
  if (number % 2) sigaltstack(&alternate, 0);
  sigset_t mask, seen;
  sigemptyset(&mask), sigaddset(&mask, SIGUSR1 + (number & 1));
  pthread_sigmask(SIG_SETMASK, &mask, 0);
  unsigned long n = 0;
  uint8_t *blocks[64] = {0};
  for (unsigned long round = 0; !stop; round++) {
    for (int i = 0; i < 500; i++) checked(round + i);
    n += 500;
    if (vectors() != reference) harm("vector registers");
    unsigned k = round % 64, size = 16 + round % 3000;
    if (blocks[k]) {
      for (unsigned i = 2; i < *(uint16_t *)blocks[k]; i++) if (blocks[k][i] != (uint8_t)(i + k)) harm("heap");
      free(blocks[k]);
    }
    blocks[k] = malloc(size);
    *(uint16_t *)blocks[k] = size;
    for (unsigned i = 2; i < size; i++) blocks[k][i] = (uint8_t)(i + k);
    if (pause_us) usleep(pause_us);
    if (round % 16 == 0) {
      pthread_sigmask(SIG_SETMASK, 0, &seen);
      for (int s = 1; s < 32; s++) if (sigismember(&seen, s) != sigismember(&mask, s)) harm("signal mask");
      sigaltstack(0, &now);
      if (number % 2 ? now.ss_sp != alternate.ss_sp || now.ss_flags : !(now.ss_flags & SS_DISABLE)) harm("alternate stack");
    }
  }
  atomic_fetch_add(&calls, n);
  return 0;
}

static void *fork_again(void *argument) {
  (void)argument;
  while (!stop) {
    pid_t child = fork();
    if (!child) {
      for (int i = 0; i < 10000; i++) checked(i);
      _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status) harm("fork");
    atomic_fetch_add(&forks, 1);
    usleep(2000);
  }
  return 0;
}

int main(int count, char **arguments) {
  int threads = count > 1 ? atoi(arguments[1]) : 8, forking = count > 2 ? atoi(arguments[2]) : 1;
  pause_us = count > 3 ? atoi(arguments[3]) : 0;
  reference = vectors();
  struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART | SA_ONSTACK};
  sigaction(SIGALRM, &action, 0);
  action.sa_handler = on_term, sigaction(SIGTERM, &action, 0);
  pthread_t all[256], forker;
  for (long i = 0; i < threads; i++) pthread_create(&all[i], 0, work, (void *)i);
  if (forking) pthread_create(&forker, 0, fork_again, 0);
  struct itimerval timer = {{0, 1000}, {0, 1000}};
  setitimer(ITIMER_REAL, &timer, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
  if (forking) pthread_join(forker, 0);
  printf("OK calls %lu ticks %lu forks %lu\n", atomic_load(&calls), atomic_load(&ticks), atomic_load(&forks)), fflush(stdout);
  return 0;
}
