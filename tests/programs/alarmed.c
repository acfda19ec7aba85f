/* CALLS: three fibers, each with a stack of its own, which a signal handler switches every half millisecond, wherever they are: mostly inside
 * take_block, an allocator of this program that takes a while and calls nothing. */
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>
#include "truth.h"
enum { FIBERS = 3, STACK = 256 << 10, SLOTS = 1 << 12 };
static ucontext_t fibers[FIBERS], scheduler;
static volatile int running, left = FIBERS;
static uint64_t calls, next_slot, switches;
static char store[SLOTS][128];

NOINLINE void *take_block(size_t size) {
  (void)size;
  char *block = store[__atomic_fetch_add(&next_slot, 1, __ATOMIC_RELAXED) % SLOTS];
  for (volatile int i = 0; i < 300; i++) {}
  KEEP(block);
  return block;
}
NOINLINE void give_block(void *block) { KEEP(block); }
SITE(00, take_block(n)) SITE(01, take_block(n)) SITE(02, take_block(n))

static void alarms(int how) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);
  sigprocmask(how, &set, 0);
}
static void on_alarm(int signal) {
  (void)signal;
  int from = running, to = (running + 1) % FIBERS;
  running = to;
  switches++;
  swapcontext(&fibers[from], &fibers[to]);
}
static void fiber(int number) {
  void *(*site[FIBERS])(size_t) = {site_00, site_01, site_02};
  alarms(SIG_UNBLOCK);
  for (uint64_t i = 0; i < calls; i++) give_block(site[number](64 + (size_t)number));
  __atomic_sub_fetch(&left, 1, __ATOMIC_RELAXED);
  while (left) {}
  alarms(SIG_BLOCK);
  setcontext(&scheduler);
}
int main(int argc, char **argv) {
  calls = argument(argc, argv, 1, 2000);
  alarms(SIG_BLOCK);
  for (int i = 0; i < FIBERS; i++) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = malloc(STACK);
    fibers[i].uc_stack.ss_size = STACK;
    makecontext(&fibers[i], (void (*)(void))fiber, 1, i);
  }
  struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, 0);
  ready();
  struct itimerval every = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
  setitimer(ITIMER_REAL, &every, 0);
  swapcontext(&scheduler, &fibers[0]);
  setitimer(ITIMER_REAL, &never, 0);
  if (switches < FIBERS) die("the fibers were not switched");
  for (uint64_t i = 0; i < calls; i++)
    for (int k = 0; k < FIBERS; k++) { took(k, 64 + (uint64_t)k); gave(k, 64 + (uint64_t)k); }
  report();
  return 0;
}
