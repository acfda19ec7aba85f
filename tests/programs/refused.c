/* ROUNDS: calls that fail, requests for 0 bytes, and frees of NULL, among ordinary calls. */
#include "truth.h"
static volatile size_t HUGE_BYTES = (size_t)1 << 46, MANY = (size_t)1 << 33;
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, calloc(n, n)) SITE(03, calloc(n, 16)) SITE(04, malloc(n))
SITE(05, calloc(0, n)) SITE(06, calloc(n, 3))
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 500);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    refused(site_00(HUGE_BYTES));
    refused(site_00(SIZE_MAX - 4096));
    refused(site_02(MANY));             /* 2^66 */
    refused(site_03(SIZE_MAX / 16 + 2));
    free(0);
    void *kept = site_04(0); took(4, 0);
    void *p = site_05(8); took(5, 0);
    free(p); gave(5, 0);
    p = site_06(50); took(6, 150);
    free(p); gave(6, 150);
    p = site_01(300); took(1, 300);
    free(p); gave(1, 300);
    free(0);
    if (r % 2) { free(kept); gave(4, 0); }
  }
  report();
  return 0;
}
