/* THREADS: ends while each of that many threads is inside an allocation of 5,000 bytes, which never returns. As in window.c,
 * posix_memalign stores its result to a page that cannot be written; here the signal's handler waits for ever. */
#include <semaphore.h>
#include <signal.h>
#include "truth.h"
static void **page;
static sem_t inside;
static pthread_barrier_t start;

NOINLINE static void *posix(size_t n) {
  if (posix_memalign(page, 64, n)) die("posix_memalign");
  return *page;
}
SITE(00, posix(n))
SITE(01, malloc(n)) /* before */
static void on_fault(int unused) {
  (void)unused;
  __atomic_add_fetch(&truth->abandoned, 1, __ATOMIC_RELAXED);
  sem_post(&inside);
  for (;;) pause();
}
static void *thread_main(void *unused) {
  pthread_barrier_wait(&start);
  for (int r = 0; r < 50; r++) {
    void *p = site_01(128); took(1, 128);
    if (r % 10) { free(p); gave(1, 128); }
  }
  site_00(5000);
  die("the call had to stay");
  return unused;
}
int main(int argc, char **argv) {
  uint64_t threads = argument(argc, argv, 1, 8);
  page = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct sigaction fault = {.sa_handler = on_fault};
  sigaction(SIGSEGV, &fault, 0);
  sem_init(&inside, 0, 0);
  pthread_barrier_init(&start, 0, (unsigned)threads + 1);
  for (uint64_t i = 0; i < threads; i++) {
    pthread_t id;
    if (pthread_create(&id, 0, thread_main, 0)) die("pthread_create");
  }
  ready();
  pthread_barrier_wait(&start);
  for (uint64_t i = 0; i < threads; i++)
    while (sem_wait(&inside)) {}
  report();
  _exit(0);
}
