/* [ROUNDS [threads | child]]: mappings that a program makes itself, with the truth for every part of them: whole and
 * partly unmapped, mapped over, grown, shrunk and moved by mremap, the heap of brk up and down, by libc and by raw
 * system calls, in threads, in a child; and blocks of malloc, which maps their memory itself. A tenth of each stays.
 *
 * A mapping that has lost a part counts as one allocation of what is left; leave() records that in the truth. */
#include "truth.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { RW = PROT_READ | PROT_WRITE, ANON = MAP_PRIVATE | MAP_ANONYMOUS };
#define PAGE ((size_t)getpagesize())
#define MAPPED(NN, CALL)                             \
  NOINLINE void *site_##NN(void *at, size_t n) {     \
    void *p = (void *)(CALL);                        \
    KEEP(p);                                         \
    if (p == MAP_FAILED) die("cannot map " #NN);     \
    return p;                                        \
  }
MAPPED(00, mmap(at, n, RW, ANON, -1, 0))
MAPPED(01, syscall(SYS_mmap, at, n, RW, ANON, -1, 0))
MAPPED(02, mmap(at, n, RW, ANON | MAP_FIXED, -1, 0))
MAPPED(03, mremap(at, 8 * PAGE, n, MREMAP_MAYMOVE))     /* grows and must move */
MAPPED(04, mremap(at, 8 * PAGE, n, 0))                  /* shrinks */
MAPPED(05, sbrk((intptr_t)n))
MAPPED(06, malloc(n))                                   /* from the threshold on, malloc maps each block */
MAPPED(07, mmap(at, n, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
MAPPED(08, mremap(at, 4 * PAGE, n, MREMAP_MAYMOVE))     /* on what is left of a mapping */
MAPPED(09, mmap(at, n, RW, ANON, -1, 0))                /* in a thread */
MAPPED(10, mmap(at, n, RW, ANON, -1, 0))                /* in a child, which inherits its parent's mappings */

/* Only `is` of a block's `was` bytes are left: changes the figures in use, but not those of allocations. */
static void leave(int site, uint64_t was, uint64_t is) {
  struct site_truth *t = &truth->processes[truth_slot].sites[site];
  gave(site, was);
  took(site, is);
  t->allocs--; t->bytes -= is;
  uint32_t i = (uint32_t)((is * 0x9e3779b97f4a7c15ull) >> 52);
  while (t->rows[i].key != is + 1) i = (i + 1) % SIZES;
  t->rows[i].allocs--;
}
static void unmap(void *p, size_t n) {
  if (munmap(p, n)) die("cannot unmap");
}
static void *thread(void *rounds) {
  for (uint64_t r = 0; r < (uint64_t)rounds; r++) {
    size_t n = (1 + r % 7) * PAGE;
    void *p = site_09(0, n); took(9, n);
    if (r % 10) { unmap(p, n); gave(9, n); }
  }
  return 0;
}
static void threads(uint64_t rounds) {
  pthread_t ids[2];
  for (int i = 0; i < 2; i++) if (pthread_create(&ids[i], 0, thread, (void *)rounds)) die("pthread_create");
  for (int i = 0; i < 2; i++) pthread_join(ids[i], 0);
}
/* The child unmaps what it inherited, which does not affect the parent's mapping, and maps its own. */
static void child(uint64_t rounds) {
  void *inherited = site_00(0, PAGE); took(0, PAGE);
  int go[2], done[2];
  char c = 0;
  if (pipe(go) || pipe(done)) die("pipe");
  pid_t pid = fork();
  if (pid < 0) die("fork");
  if (!pid) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    truth_is(1);
    if (read(go[0], &c, 1) != 1) _exit(1);
    unmap(inherited, PAGE);
    for (uint64_t r = 0; r < rounds; r++) {
      void *p = site_10(0, 5 * PAGE); took(10, 5 * PAGE);
      if (r % 10) { unmap(p, 5 * PAGE); gave(10, 5 * PAGE); }
    }
    if (write(done[1], &c, 1) != 1) _exit(1);
    for (;;) pause();
  }
  step();
  if (write(go[1], &c, 1) != 1 || read(done[0], &c, 1) != 1) die("the child is gone");
  report();
  kill(pid, 9);
  exit(0);
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 200);
  ready();
  if (argc > 2 && argv[2][0] == 'c') child(rounds);
  if (argc > 2) threads(rounds);
  for (uint64_t r = 0; r < rounds; r++) {
    int stays = r % 10 == 0;
    /* A length that is not a multiple of a page is counted as requested. */
    size_t n = 4 * PAGE + r % 3 * 1000;
    char *p = site_00(0, n); took(0, n);
    if (!stays) { unmap(p, n); gave(0, n); }

    p = site_01(0, 16 * PAGE); took(1, 16 * PAGE);
    if (r % 4 == 1) { /* the head, then a hole, then the rest and what surrounds it */
      unmap(p, PAGE); leave(1, 16 * PAGE, 15 * PAGE);
      unmap(p + 5 * PAGE, 3 * PAGE); leave(1, 15 * PAGE, 12 * PAGE);
    } else if (r % 4 == 2) {
      unmap(p, 16 * PAGE); gave(1, 16 * PAGE);
    } else if (r % 4 == 3) { /* maps another in its middle, then unmaps that with the end */
      site_02(p + 4 * PAGE, 4 * PAGE); took(2, 4 * PAGE); leave(1, 16 * PAGE, 12 * PAGE);
      if (!stays) { unmap(p + 4 * PAGE, 12 * PAGE); gave(2, 4 * PAGE); leave(1, 12 * PAGE, 4 * PAGE); }
    }

    p = site_00(0, 8 * PAGE); took(0, 8 * PAGE);
    p = site_03(p, 64 * PAGE); gave(0, 8 * PAGE); took(3, 64 * PAGE);
    if (!stays) { unmap(p, 64 * PAGE); gave(3, 64 * PAGE); }

    p = site_00(0, 8 * PAGE); took(0, 8 * PAGE);
    p = site_04(p, 3 * PAGE); gave(0, 8 * PAGE); took(4, 3 * PAGE);
    if (!stays) { unmap(p, 3 * PAGE); gave(4, 3 * PAGE); }

    p = site_00(0, 8 * PAGE); took(0, 8 * PAGE);
    p = site_08(p, 6 * PAGE); leave(0, 8 * PAGE, 4 * PAGE); took(8, 6 * PAGE);
    unmap(p, 6 * PAGE); gave(8, 6 * PAGE);

    /* Whole pages are unmapped, even if the length is not a multiple of a page. */
    p = site_00(0, 3 * PAGE); took(0, 3 * PAGE);
    unmap(p, PAGE + 1); leave(0, 3 * PAGE, PAGE);
    unmap(p + 2 * PAGE, 1); gave(0, PAGE);

    p = site_06(0, 200000 + r); took(6, 200000 + r);
    if (!stays) { free(p); gave(6, 200000 + r); }
    p = site_06(0, 100); took(6, 100);

    p = site_07(0, 2 * PAGE); took(7, 2 * PAGE);
    if (!stays) { unmap(p, 2 * PAGE); gave(7, 2 * PAGE); }

    /* These must not count: failures, and a file. */
    if (mmap(0, 0, RW, ANON, -1, 0) != MAP_FAILED || munmap(p + 1, PAGE) == 0) die("nonsense was accepted");
    p = mmap(0, sizeof *truth, PROT_READ, MAP_SHARED, TRUTH_FD, 0);
    if (p == MAP_FAILED) die("cannot map a file");
    unmap(p, sizeof *truth);
  }
  /* The heap of brk. malloc extends it too for its own use, but not between two calls of ours. */
  site_05(0, 10000); took(5, 10000);
  site_05(0, 50000); took(5, 50000);
  if (sbrk(-20000) == (void *)-1) die("sbrk");
  leave(5, 50000, 30000);
  if (sbrk(-35000) == (void *)-1) die("sbrk");
  gave(5, 30000); leave(5, 10000, 5000);

  report();
  return 0;
}
