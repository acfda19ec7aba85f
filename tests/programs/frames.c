/* ROUNDS: allocations under call paths that are hard to unwind. Built with and without frame pointers and with -pg; the
 * functions on each path are its truth, `expected` in tests/tests/company/stacks.rs. Each site is on one path only. */
#include <alloca.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>
#include "truth.h"
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n)) SITE(04, malloc(n))
SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n))
static uint64_t rounds;

static void once(int i, void *p, size_t n) {
  took(i, n);
  free(p);
  gave(i, n);
}

NOINLINE void recursive(int depth) {
  if (depth) recursive(depth - 1);
  else once(0, site_00(100), 100);
  KEEP(depth);
}
NOINLINE void in_recursion(void) {
  recursive(200);
  KEEP(rounds);
}

/* The size of the frame is known only at run time. */
NOINLINE void with_alloca(size_t n) {
  char *space = alloca(n);
  KEEP(space);
  once(1, site_01(100), 100);
  KEEP(space);
}

/* `jumps` ends in a tail jump, so it is no longer on the stack when the site runs. */
NOINLINE void *jumped_to(size_t n) {
  void *p = site_02(n);
  KEEP(p);
  return p;
}
NOINLINE void *jumps(size_t n) {
  __asm__ volatile("" ::: "memory");
  return jumped_to(n + 1);
}
NOINLINE void before_the_jump(void) {
  void *p = jumps(99);
  once(2, p, 100);
  KEEP(p);
}

static void on_signal(int unused) {
  (void)unused;
  once(3, site_03(100), 100);
  KEEP(rounds);
}
NOINLINE void raises(void) {
  kill(getpid(), SIGUSR1);
  KEEP(rounds);
}

/* A coroutine on a stack of its own. */
static ucontext_t here, there;
static char stack[64 * 1024] __attribute__((aligned(64)));
NOINLINE void in_coroutine(void) {
  once(4, site_04(100), 100);
  KEEP(rounds);
}
static void coroutine(void) {
  for (;;) {
    in_coroutine();
    swapcontext(&there, &here);
  }
}
NOINLINE void switches(void) {
  swapcontext(&here, &there);
  KEEP(rounds);
}

/* A callback of libc, which has no frame pointers. */
static int compares(const void *a, const void *b) {
  once(5, site_05(100), 100);
  KEEP(rounds);
  return *(const int *)a - *(const int *)b;
}
NOINLINE void sorts(void) {
  int two[2] = {2, 1};
  qsort(two, 2, sizeof *two, compares);
  KEEP(rounds);
}

/* A timer's signal arrives somewhere in the vDSO, in clock_gettime's stub in libc, in the PLT, or between. */
static volatile uint64_t ticks;
static volatile int reading; /* on a slow machine, signals arrive between its calls too */
static void on_tick(int unused) {
  (void)unused;
  if (!reading) return;
  once(6, site_06(100), 100);
  ticks++;
}
NOINLINE void reads_the_clock(void) {
  struct timespec now;
  reading = 1;
  for (uint64_t until = ticks + 10; ticks < until;) clock_gettime(CLOCK_MONOTONIC, &now);
  reading = 0;
  KEEP(rounds);
}

NOINLINE void in_thread(void) {
  once(7, site_07(100), 100);
  KEEP(rounds);
}
static pthread_barrier_t start;
static void *thread_main(void *unused) {
  pthread_barrier_wait(&start);
  for (uint64_t r = 0; r < rounds; r++) in_thread();
  return unused;
}

int main(int argc, char **argv) {
  rounds = argument(argc, argv, 1, 50);
  signal(SIGUSR1, on_signal);
  signal(SIGALRM, on_tick);
  getcontext(&there);
  there.uc_stack.ss_sp = stack;
  there.uc_stack.ss_size = sizeof stack;
  there.uc_link = &here;
  makecontext(&there, coroutine, 0);
  pthread_t id;
  pthread_barrier_init(&start, 0, 2);
  /* The timer's signals are for the main thread. */
  sigset_t tick;
  sigemptyset(&tick);
  sigaddset(&tick, SIGALRM);
  pthread_sigmask(SIG_BLOCK, &tick, 0);
  pthread_create(&id, 0, thread_main, 0);
  pthread_sigmask(SIG_UNBLOCK, &tick, 0);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    in_recursion();
    with_alloca(1000 + r * 40);
    before_the_jump();
    raises();
    switches();
    sorts();
  }
  struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
  setitimer(ITIMER_REAL, &often, 0);
  for (uint64_t r = 0; r < rounds / 10; r++) reads_the_clock();
  setitimer(ITIMER_REAL, &never, 0);
  pthread_barrier_wait(&start);
  pthread_join(id, 0);
  report();
  return 0;
}
