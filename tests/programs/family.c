/* MODE: one process becomes or starts another. Slot 0 of the truth is the first process, slot 1 the second one.
 *   fork        the child frees half of what it inherited (not its own allocations) and allocates its own
 *   vfork       the child borrows the address space, allocates there and execs /bin/true
 *   clone       a second thread group in the same address space frees and allocates there, then exits
 *   exec [XX…]  the process replaces its program; the new incarnation with the same pid continues to allocate. In between
 *               there is one short life for each X
 *   exec from another thread [step]  the same, by a thread that has never called an allocator. With `step`, the program
 *               that follows prints STEP and waits first
 * In the first three, the second process prints STEP and waits for its probes before it touches the heap. */
#include <sched.h>
#include <signal.h>
#include "truth.h"
enum { BLOCKS = 100 };
SITE(00, malloc(n)) /* the first process, before */
SITE(01, malloc(n)) /* the first process, after */
SITE(02, malloc(n)) /* the second process */
SITE(03, malloc(n)) /* the second process, freed by the first */
static void *inherited[BLOCKS], *shared[BLOCKS];

static void fill(void) {
  for (int i = 0; i < BLOCKS; i++) {
    inherited[i] = site_00(200);
    took(0, 200);
  }
}
static void carry_on(void) {
  for (int i = 0; i < BLOCKS; i++) {
    void *p = site_01(300);
    took(1, 300);
    if (i % 4) { free(p); gave(1, 300); }
  }
}
/* Runs in the second process with the first one's memory: the allocations are its own, the blocks are shared. */
static int borrower(void *unused) {
  (void)unused;
  truth->processes[1].pid = (uint64_t)getpid();
  step();
  for (int i = 0; i < BLOCKS; i++) {
    void *p = site_02(400);
    took_in(1, 2, 400);
    if (i % 5) { free(p); gave_in(1, 2, 400); }
    shared[i] = site_03(500);
    took_in(1, 3, 500);
  }
  for (int i = 0; i < BLOCKS / 2; i++) { free(inherited[i]); gave_in(0, 0, 200); }
  return 0;
}
static void take_back(void) {
  for (int i = 0; i < BLOCKS / 2; i++) { free(shared[i]); gave_in(1, 3, 500); }
}

static void by_fork(void) {
  pid_t child = fork();
  if (!child) {
    truth_is(1);
    step();
    for (int i = 0; i < BLOCKS / 2; i++) free(inherited[i]);
    for (int i = 0; i < BLOCKS; i++) {
      void *p = site_02(400);
      took(2, 400);
      if (i % 5) { free(p); gave(2, 400); }
    }
    _exit(0);
  }
  waitpid(child, 0, 0);
}
static void by_vfork(void) {
  pid_t child = vfork();
  if (!child) {
    borrower(0);
    execl("/bin/true", "true", (char *)0);
    _exit(1);
  }
  waitpid(child, 0, 0);
  take_back();
}
static void by_clone(void) {
  static char stack[256 * 1024] __attribute__((aligned(64)));
  pid_t child = clone(borrower, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, 0);
  if (child < 0) die("clone");
  waitpid(child, 0, 0);
  take_back();
}
static void live_again(char *name, const char *short_lives) {
  if (*short_lives) execl("/proc/self/exe", name, "short life", short_lives + 1, (char *)0);
  else execl("/proc/self/exe", name, "second life", (char *)0);
  die("exec");
}
/* A thread that calls nothing but exec, once it may. */
static pthread_barrier_t filled;
static void *by_another_thread(void *arguments) {
  char **argv = arguments;
  pthread_barrier_wait(&filled);
  execl("/proc/self/exe", argv[0], "second life", argv[2], (char *)0);
  _exit(1);
}
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "fork";
  if (!strcmp(mode, "short life")) {
    truth_map(TRUTH_FD);
    truth_is(1);
    site_03(100);
    took(3, 100);
    live_again(argv[0], argv[2]);
  }
  if (!strcmp(mode, "second life")) {
    truth_map(TRUTH_FD);
    truth_is(1); /* the pid is the first incarnation's */
    if (argc > 2) step();
    for (int i = 0; i < BLOCKS; i++) {
      void *p = site_02(400);
      took(2, 400);
      if (i % 5) { free(p); gave(2, 400); }
    }
    report();
    return 0;
  }
  pthread_t other;
  pthread_barrier_init(&filled, 0, 2);
  int in_another_thread = !strcmp(mode, "exec from another thread");
  if (in_another_thread && pthread_create(&other, 0, by_another_thread, argv)) die("pthread_create");
  ready();
  fill();
  if (!strcmp(mode, "fork")) by_fork();
  else if (!strcmp(mode, "vfork")) by_vfork();
  else if (!strcmp(mode, "clone")) by_clone();
  else if (!strcmp(mode, "exec")) live_again(argv[0], argc > 2 ? argv[2] : "");
  else if (in_another_thread) {
    pthread_barrier_wait(&filled);
    for (;;) pause();
  } else die("which mode?");
  carry_on();
  report();
  return 0;
}
