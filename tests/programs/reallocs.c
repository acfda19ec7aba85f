/* ROUNDS: every outcome of realloc and reallocarray. A success is a free of the old block and an allocation of the new
 * size; a failure leaves the old block as it was. A tenth of each round's blocks stays allocated. */
#include "truth.h"
static volatile size_t HUGE_BYTES = (size_t)1 << 46, TOO_MANY = (size_t)1 << 60;
SITE(00, malloc(n))
#define RESIZE(NN, CALL)                          \
  NOINLINE void *site_##NN(void *old, size_t n) { \
    void *p = (CALL);                             \
    KEEP(p);                                      \
    return p;                                     \
  }
RESIZE(01, realloc(old, n))            /* grows a little */
RESIZE(02, realloc(old, n))            /* shrinks */
RESIZE(03, realloc(old, n))            /* must move: the block above it is in use */
RESIZE(04, realloc(old, n))            /* of NULL: a malloc */
RESIZE(05, realloc(old, n))            /* to 0: a free */
RESIZE(06, realloc(old, n))            /* fails */
RESIZE(07, reallocarray(old, n, 8))    /* grows */
RESIZE(08, reallocarray(old, n, 64))   /* overflows */
RESIZE(09, realloc(old, n))            /* so large that pages are remapped */
RESIZE(10, reallocarray(old, n, 16))   /* of NULL: a malloc */

static void end(void *p, int site, size_t size, uint64_t round) {
  if (round % 10 == 0) return;
  free(p);
  gave(site, size);
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 500);
  ready();
  uint64_t moved = 0;
  for (uint64_t r = 0; r < rounds; r++) {
    size_t n = 64 + r % 5 * 32;
    void *p = site_00(n); took(0, n);
    p = site_01(p, n + 8); gave(0, n); took(1, n + 8);
    void *above = site_00(n); took(0, n);
    void *was = p;
    p = site_03(p, 20 * n); gave(1, n + 8); took(3, 20 * n);
    moved += p != was;
    p = site_02(p, n / 2); gave(3, 20 * n); took(2, n / 2);
    refused(site_06(p, HUGE_BYTES));
    refused(site_08(p, TOO_MANY));
    refused(site_06(p, SIZE_MAX / 2));
    p = site_07(p, n); gave(2, n / 2); took(7, 8 * n);
    end(p, 7, 8 * n, r);
    end(above, 0, n, r);

    p = site_04(0, n); took(4, n);
    end(p, 4, n, r);
    p = site_10(0, n); took(10, 16 * n);
    end(p, 10, 16 * n, r);

    p = site_00(n); took(0, n);
    if (site_05(p, 0)) die("realloc to 0 returned a block: not glibc");
    gave(0, n);

    p = site_00((size_t)1 << 20); took(0, (size_t)1 << 20);
    p = site_09(p, (size_t)9 << 20); gave(0, (size_t)1 << 20); took(9, (size_t)9 << 20);
    end(p, 9, (size_t)9 << 20, r);
  }
  if (moved < rounds / 2) die("the blocks did not move");
  report();
  return 0;
}
