/* Threads that run on stacks of 1 KiB in the middle of other data, as coroutines do. What lies below a thread's stack is the
 * data of another thread, which changes and checks it nearly without a pause. Ends on SIGTERM and prints OK and the number of rounds,
 * or the first harm.
 * small_stacks all: no thread is on the stack that it was given; small_stacks sleeping: the first one is, and sleeps. */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 3, WORDS = 1024, STACK = 1024 };

/* One after the other, all of it in one mapping. */
struct place {
  volatile uint64_t data[WORDS];
  char stack[STACK] __attribute__((aligned(16)));
};

static struct place *places;
static volatile sig_atomic_t stop;
static atomic_ulong rounds;

static void harm(const char *what) {
  (void)!write(2, what, strlen(what));
  _exit(3);
}

static void on_term(int signal) { (void)signal, stop = 1; }

/* Runs on the small stack, so it needs little. */
static void work(long number) {
  volatile uint64_t *data = places[(number + 1) % THREADS].data;
  unsigned long n = 0;
  for (; !stop; n++) {
    for (int i = 0; i < WORDS; i++) {
      if (data[i] != n + i) harm("HARM data below another's stack\n");
      data[i] = n + i + 1;
    }
    if (hooked(n) != 3 * (long)n + 7) harm("HARM result\n");
    /* Who sleeps now and then is stopped in time, however much else runs. */
    if (n % 64 == 0) usleep(200);
  }
  atomic_fetch_add(&rounds, n);
}

static void *on_small_stack(void *argument) {
  long number = (long)argument;
  char *top = places[number].stack + STACK;
  __asm__ volatile(
      "mov %%rsp, %%rbx\n mov %[top], %%rsp\n mov %[number], %%rdi\n call *%[work]\n mov %%rbx, %%rsp\n"
      :
      : [top] "r"(top), [number] "r"(number), [work] "r"(work)
      : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
  return 0;
}

int main(int count, char **arguments) {
  int all = count > 1 && !strcmp(arguments[1], "all");
  /* To bind it takes more stack than the threads have. */
  usleep(1);
  places = aligned_alloc(4096, 1 << 16);
  for (int i = 0; i < THREADS; i++)
    for (int j = 0; j < WORDS; j++) places[i].data[j] = j;
  stack_t alternate = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
  sigaltstack(&alternate, 0);
  struct sigaction action = {.sa_handler = on_term, .sa_flags = SA_ONSTACK};
  sigaction(SIGTERM, &action, 0);
  sigset_t mask;
  sigemptyset(&mask), sigaddset(&mask, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &mask, 0);
  pthread_t threads[THREADS];
  for (long i = 1; i < THREADS; i++) pthread_create(&threads[i], 0, on_small_stack, (void *)i);
  if (!all) pthread_create(&threads[0], 0, on_small_stack, 0);
  pthread_sigmask(SIG_UNBLOCK, &mask, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  if (all) on_small_stack(0);
  while (!stop) usleep(10000);
  for (int i = all; i < THREADS; i++) pthread_join(threads[i], 0);
  printf("OK rounds %lu\n", atomic_load(&rounds)), fflush(stdout);
  return 0;
}
