/* Blocks of 1 MiB and 64 KiB, each in a mapping of its own or written to as a whole, so that it is known to the byte what of them is in
 * memory: half of it, all, what malloc wrote before it, what is left after half was given back, and zero pages that were read. */
#include "truth.h"
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
enum { PAGE = 4096, MIB = 1 << 20, HALF = MIB / 2, BLOCKS = 40 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n)) SITE(04, malloc(n))

int main(void) {
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  ready();
  for (int i = 0; i < BLOCKS; i++) {
    /* A block of this size begins 16 bytes behind the start of its mapping. */
    memset(site_00(MIB), 1, HALF - 16);
    memset(site_01(MIB / 16), 1, MIB / 16);
    site_02(MIB);
    char *given_back = memset(site_03(MIB), 1, MIB);
    madvise(given_back - 16 + PAGE, HALF, MADV_DONTNEED);
    volatile char *read = site_04(MIB);
    for (int k = 0; k < MIB; k += PAGE) (void)read[k];
    took(0, MIB), took(1, MIB / 16), took(2, MIB), took(3, MIB), took(4, MIB);
  }
  report();
  return 0;
}
