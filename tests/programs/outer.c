/* MODE ROUNDS: allocations below large frames.
 * stay: of the main thread and of another one, one of the first frames has 100 KB.
 * change: a function with a frame of 8 KB calls the site; after ROUNDS times others do, through the same pointer, the last one
 * with a frame that leaves what the first one has left there as it was. */
#include "truth.h"
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
static uint64_t rounds;
static pthread_barrier_t start, end;

static void once(int site, void *p) {
  static uint64_t calls[4];
  took(site, 100);
  if (++calls[site] % 10) { free(p); gave(site, 100); }
}
/* Long enough for the daemon to take a sample in before there are many more. */
static void pause_shortly(void) {
  struct timespec pause = {0, 2000000};
  nanosleep(&pause, 0);
}

NOINLINE static void descend(int site, uint64_t depth) {
  if (depth) descend(site, depth - 1);
  else once(site, site ? site_01(100) : site_00(100));
  KEEP(depth);
}
NOINLINE static void in_large_frame(int site) {
  char space[100000];
  char *there = space;
  KEEP(there);
  for (uint64_t k = 0; k < rounds; k++) { descend(site, k % 7); pause_shortly(); }
  KEEP(there);
}
static void *thread_main(void *unused) {
  char space[60000];
  char *there = space;
  KEEP(there);
  pthread_barrier_wait(&start);
  in_large_frame(1);
  pthread_barrier_wait(&end);
  KEEP(there);
  return unused;
}

/* The last call from here is the site's, so its return address stays where it was. */
NOINLINE static void *leaves(void) {
  char space[8000];
  char *there = space;
  KEEP(there);
  void *p = site_02(100);
  KEEP(there);
  return p;
}
NOINLINE static void *covers(void) {
  char space[64000];
  char *there = space;
  /* All but the upper 7 KB, in which `leaves` has its return address: a page that was never touched cannot be copied. */
  memset(there, 1, 57000);
  KEEP(there);
  void *p = site_03(100);
  KEEP(there);
  return p;
}
NOINLINE static void *through(void) {
  char space[3000];
  char *there = space;
  KEEP(there);
  void *p = covers();
  KEEP(there);
  return p;
}
NOINLINE static void act(void *(*volatile *what)(void)) {
  void *p = (*what)();
  once(*what == leaves ? 2 : 3, p);
}

int main(int argc, char **argv) {
  int changes = argc > 1 && !strcmp(argv[1], "change");
  rounds = argument(argc, argv, 2, 400);
  pthread_t thread;
  if (!changes) {
    pthread_barrier_init(&start, 0, 2);
    pthread_barrier_init(&end, 0, 2);
    pthread_create(&thread, 0, thread_main, 0);
  }
  ready();
  if (changes) {
    void *(*volatile what)(void) = leaves;
    for (uint64_t k = 0; k < 3 * rounds; k++) {
      what = k < rounds || (k < 2 * rounds && k % 2) ? leaves : through;
      act(&what);
      pause_shortly();
    }
  } else {
    pthread_barrier_wait(&start);
    in_large_frame(0);
    pthread_barrier_wait(&end);
  }
  report();
  return 0;
}
