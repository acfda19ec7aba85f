/* MODE ROUNDS: events while a call is inside the allocator. posix_memalign stores its result through a pointer;
 * that store, to a page that is not writable, raises SIGSEGV at a point where the allocator's own state is consistent,
 * so what follows is deterministic:
 *   handler     the handler allocates and frees (inside the outer call's window), opens the page, and the store succeeds
 *   jump        the handler longjmps out: the outer call never returns
 *   thread      the thread exits there (this thread only): the outer call never returns
 *   timer       no fault: an interval timer interrupts at any point; its handler allocates nothing */
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include "truth.h"
static void **page;
static sigjmp_buf out;
static const char *mode;
static volatile uint64_t ticks;
static pthread_barrier_t start;

NOINLINE static void *posix(size_t n) {
  if (posix_memalign(page, 64, n)) die("posix_memalign");
  return *page;
}
SITE(00, posix(n))
SITE(01, malloc(n)) /* in the handler */
SITE(02, malloc(n)) /* afterwards */
static void protect(int how) {
  if (mprotect(page, 4096, how)) die("mprotect");
}
static void on_fault(int unused) {
  (void)unused;
  void *kept = site_01(700); took(1, 700);
  void *p = site_01(900); took(1, 900);
  free(p); gave(1, 900);
  KEEP(kept);
  if (!strcmp(mode, "handler")) protect(PROT_READ | PROT_WRITE);
  else {
    truth->abandoned++;
    if (!strcmp(mode, "jump")) siglongjmp(out, 1);
    syscall(SYS_exit, 0);
  }
}
static void on_tick(int unused) { (void)unused; ticks++; }
static void afterwards(uint64_t rounds) {
  for (uint64_t r = 0; r < rounds; r++) {
    void *p = site_02(128); took(2, 128);
    if (r % 10) { free(p); gave(2, 128); }
  }
}
static void *doomed(void *unused) {
  pthread_barrier_wait(&start);
  afterwards(50);
  site_00(5000);
  die("the thread had to end");
  return unused;
}
int main(int argc, char **argv) {
  mode = argc > 1 ? argv[1] : "handler";
  volatile uint64_t rounds = argument(argc, argv, 2, 200);
  page = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct sigaction fault = {.sa_handler = on_fault, .sa_flags = SA_NODEFER};
  struct sigaction tick = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
  sigaction(SIGSEGV, &fault, 0);
  sigaction(SIGALRM, &tick, 0);
  pthread_t id;
  pthread_barrier_init(&start, 0, 2);
  if (!strcmp(mode, "thread")) pthread_create(&id, 0, doomed, 0);
  ready();
  if (!strcmp(mode, "thread")) {
    pthread_barrier_wait(&start);
    pthread_join(id, 0);
    afterwards(rounds);
  } else if (!strcmp(mode, "timer")) {
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, 0);
    for (uint64_t r = 0; r < rounds || ticks < 50; r++) afterwards(20);
    setitimer(ITIMER_REAL, &never, 0);
  } else
    for (volatile uint64_t r = 0; r < rounds; r++) {
      protect(PROT_NONE);
      if (!strcmp(mode, "handler")) {
        void *p = site_00(5000);
        took(0, 5000);
        if (r % 10) { free(p); gave(0, 5000); }
      } else if (!sigsetjmp(out, 1)) {
        site_00(5000);
        die("the jump was not taken");
      }
      afterwards(20);
    }
  report();
  return 0;
}
