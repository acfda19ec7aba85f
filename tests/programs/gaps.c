/* ROUNDS: allocations on stacks of which parts were never touched, and on a stack that no thread began on.
 *
 * site_00: on the main thread, below an array that is not used. site_01: the same on another thread.
 * site_02, site_03: on a stack made by hand, far from those of threads, below 300 KiB that are in use; a step apart, and
 * site_02 in two steps. */
#include <ucontext.h>
#include "truth.h"
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
enum { UNUSED = 160 << 10, USED = 300 << 10, STACK = 1 << 20, FAR = 256 << 20 };
static uint64_t rounds;
static ucontext_t outside, inside;

static NOINLINE void allocate(int site) {
  for (uint64_t k = 0; k < rounds; k++) {
    void *p = site == 0 ? site_00(100) : site == 1 ? site_01(100) : site == 2 ? site_02(100) : site_03(100);
    took(site, 100);
    free(p);
    gave(site, 100);
  }
}

static NOINLINE void below_unused_space(int site) {
  char space[UNUSED];
  char *there = space;
  KEEP(there);
  allocate(site);
  KEEP(there);
}

static NOINLINE void below_used_space(int site) {
  char space[USED];
  memset(space, site, sizeof space);
  char *there = space;
  KEEP(there);
  allocate(site);
  KEEP(there);
}

static void *thread_main(void *turn) {
  pthread_mutex_lock(turn);
  below_unused_space(1);
  return 0;
}

static void made_by_hand(void) {
  for (int i = 0; i < 2; i++) {
    below_used_space(2);
    swapcontext(&inside, &outside);
  }
  below_used_space(3);
}

int main(int argc, char **argv) {
  rounds = argument(argc, argv, 1, 100);
  /* What is mapped next lies below. */
  if (mmap(0, FAR, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED) die("no space");
  void *stack = mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stack == MAP_FAILED) die("no space");
  getcontext(&inside);
  inside.uc_stack.ss_sp = stack;
  inside.uc_stack.ss_size = STACK;
  inside.uc_link = &outside;
  makecontext(&inside, made_by_hand, 0);
  static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&turn);
  pthread_t thread;
  if (pthread_create(&thread, 0, thread_main, &turn)) die("no thread");
  ready();
  below_unused_space(0);
  pthread_mutex_unlock(&turn);
  pthread_join(thread, 0);
  for (int i = 0; i < 2; i++) {
    swapcontext(&outside, &inside);
    step();
  }
  swapcontext(&outside, &inside);
  report();
  return 0;
}
