/* ROUNDS: memalign, aligned_alloc, posix_memalign, valloc and pvalloc, the alignments for which glibc goes straight to
 * malloc, and calls that fail. A tenth of each round's blocks stays allocated. */
#include <malloc.h>
#include "truth.h"
static volatile size_t HUGE_BYTES = (size_t)1 << 46, BAD_ALIGNMENT = (size_t)1 << 63;
NOINLINE static void *posix(size_t alignment, size_t n) {
  void *p = 0;
  int error = posix_memalign(&p, alignment, n);
  KEEP(p);
  return error ? 0 : p;
}
SITE(00, memalign(64, n)) SITE(01, memalign(8, n)) SITE(02, memalign(16, n)) SITE(03, memalign(4096, n))
SITE(04, aligned_alloc(64, n)) SITE(05, aligned_alloc(16, n)) SITE(06, valloc(n)) SITE(07, pvalloc(n))
SITE(08, posix(64, n)) SITE(09, posix(8, n)) SITE(10, posix(16, n)) SITE(11, posix(65536, n))
SITE(12, posix(3, n))              /* EINVAL */
SITE(13, posix(64, n))             /* ENOMEM */
SITE(14, memalign(BAD_ALIGNMENT, n))
SITE(15, memalign(64, n))          /* ENOMEM */
SITE(16, posix(64, n))             /* of 0 bytes */
static void *(*const works[])(size_t) = {site_00, site_01, site_02, site_03, site_04, site_05,
                                         site_06, site_07, site_08, site_09, site_10, site_11};
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 500);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    for (int i = 0; i < 12; i++) {
      size_t n = 100 + 64 * (size_t)i;
      void *p = works[i](n);
      took(i, n);
      if (r % 10) {
        free(p);
        gave(i, n);
      }
    }
    refused(site_12(100));
    refused(site_13(HUGE_BYTES));
    refused(site_14(100));
    refused(site_15(HUGE_BYTES));
    void *p = site_16(0);
    took(16, 0);
    if (r % 10) {
      free(p);
      gave(16, 0);
    }
  }
  report();
  return 0;
}
