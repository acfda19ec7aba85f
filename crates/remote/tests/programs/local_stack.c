/* A coroutine, or a signal's handler, whose stack is a local array. What lies below is a local array of the same function, which another
 * thread changes and checks without a pause. local_stack main|thread|alternate: whose function it is, or that the handler's stack is one. Ends
 * on SIGTERM and prints OK and the number of rounds, or the first harm. */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { WORDS = 2048, STACK = 16384, LEFT = 900 };
struct place {
  volatile uint64_t data[WORDS];
  char stack[STACK] __attribute__((aligned(16)));
};
static struct place *place;
static volatile sig_atomic_t stop;
static int is_alternate;
static void on_term(int signal) { (void)signal, stop = 1; }

static void *check(void *unused) {
  unsigned long n = 0;
  for (; !stop; n++)
    for (int i = 0; i < WORDS; i++) {
      if (place->data[i] != n + i) (void)!write(2, "HARM a local array\n", 19), _exit(3);
      place->data[i] = n + i + 1;
    }
  printf("OK rounds %lu\n", n), fflush(stdout);
  return unused;
}
/* Leaves little of its stack. */
static __attribute__((noinline)) void deep(void) {
  volatile char used[(char *)__builtin_frame_address(0) - place->stack - LEFT];
  used[0] = 1;
  for (long i = 0; !stop; i++) {
    if (hooked(i) != 3 * i + 7) _exit(4);
    if (i % 100000 == 0) usleep(200);
  }
}
static void on_signal(int signal) { (void)signal, deep(); }
static __attribute__((noinline)) void with_local_stack(void) {
  struct place local;
  for (int i = 0; i < WORDS; i++) local.data[i] = i;
  place = &local;
  sigset_t mask, before;
  sigemptyset(&mask), sigaddset(&mask, SIGTERM), pthread_sigmask(SIG_UNBLOCK, &mask, 0);
  pthread_t checker;
  pthread_create(&checker, 0, check, 0);
  pthread_sigmask(SIG_BLOCK, &mask, &before);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  if (is_alternate) {
    stack_t alternate = {.ss_sp = local.stack, .ss_size = STACK};
    sigaltstack(&alternate, 0);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR2, &action, 0), raise(SIGUSR2);
  } else {
    __asm__ volatile("mov %%rsp, %%rbx\n mov %[top], %%rsp\n call *%[deep]\n mov %%rbx, %%rsp\n"
                     :
                     : [top] "r"(local.stack + STACK), [deep] "r"(deep)
                     : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
  }
  pthread_join(checker, 0);
}
static void *in_thread(void *unused) { with_local_stack(); return unused; }

int main(int count, char **arguments) {
  const char *whose = count > 1 ? arguments[1] : "main";
  struct sigaction action = {.sa_handler = on_term};
  sigaction(SIGTERM, &action, 0);
  usleep(1);
  is_alternate = !strcmp(whose, "alternate");
  if (strcmp(whose, "thread")) return with_local_stack(), 0;
  pthread_t thread;
  pthread_create(&thread, 0, in_thread, 0);
  pthread_join(thread, 0);
  return 0;
}
