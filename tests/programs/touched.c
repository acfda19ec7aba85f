/* [maps]: blocks of 1 MiB and 64 KiB, each in a mapping of its own or written to as a whole, so that it is known to the byte what of them
 * is in memory: half of it, all, what malloc wrote before it, what is left after half was given back, and zero pages that were read. With
 * an argument, only a terabyte that is mapped, of which three pages in each of 40 places are written to. */
#include "truth.h"
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
enum { PAGE = 4096, MIB = 1 << 20, HALF = MIB / 2, BLOCKS = 40 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n)) SITE(04, malloc(n))
SITE(05, mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))

static int maps(void) {
  const uint64_t size = 1ull << 40;
  char *reserved = site_05(size);
  if (reserved == MAP_FAILED) die("mmap");
  took(5, size);
  for (uint64_t i = 0; i < BLOCKS; i++) memset(reserved + i * (size / BLOCKS) / PAGE * PAGE, 1, 3 * PAGE);
  report();
  return 0;
}

int main(int argc, char **argv) {
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  ready();
  if (argc > 1 && argv[1]) return maps();
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
