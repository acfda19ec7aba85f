/* Threads that come and go without a pause. storm joined: each of many threads creates one after the other, and waits for its end; storm
 * successive: each of many threads creates its successor, and ends. Ends on SIGTERM and prints OK and the number of threads, or the first
 * harm. */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { AT_ONCE = 100, CALLS = 50, PAUSE_US = 1000, STACK = 1 << 16 };
static volatile sig_atomic_t stop;
static int is_successive;
static pthread_attr_t attributes;
static atomic_ulong created;
static atomic_int left = AT_ONCE;

static void on_term(int signal) { (void)signal, stop = 1; }

static void *brief(void *unused);
static pthread_t create(void) {
  pthread_t thread;
  if (pthread_create(&thread, &attributes, brief, 0)) (void)!write(2, "HARM no thread\n", 15), _exit(3);
  atomic_fetch_add(&created, 1);
  return thread;
}

static void *brief(void *unused) {
  for (long i = 0; i < CALLS; i++)
    if (hooked(i) != 3 * i + 7) (void)!write(2, "HARM result\n", 12), _exit(4);
  /* Long enough to be in the next list of threads. */
  usleep(PAUSE_US);
  if (is_successive && !stop)
    create();
  else if (is_successive)
    atomic_fetch_sub(&left, 1);
  return unused;
}

static void *create_and_join(void *unused) {
  while (!stop) pthread_join(create(), 0);
  atomic_fetch_sub(&left, 1);
  return unused;
}

int main(int count, char **arguments) {
  is_successive = count > 1 && !strcmp(arguments[1], "successive");
  struct sigaction action = {.sa_handler = on_term, .sa_flags = SA_RESTART};
  sigaction(SIGTERM, &action, 0);
  pthread_attr_init(&attributes), pthread_attr_setstacksize(&attributes, STACK);
  if (is_successive) pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t creator;
  for (int i = 0; i < AT_ONCE; i++)
    if (is_successive)
      create();
    else
      pthread_create(&creator, 0, create_and_join, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  while (atomic_load(&left)) usleep(1000);
  printf("OK threads %lu\n", atomic_load(&created)), fflush(stdout);
  _exit(0);
}
