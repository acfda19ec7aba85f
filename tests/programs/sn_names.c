/* ROUNDS: every function of the stand-in for snmalloc (snmalloc.c). */
#include "truth.h"
void *sn_malloc(size_t);
void *sn_calloc(size_t, size_t);
void *sn_realloc(void *, size_t);
void sn_free(void *);
void *sn_rust_alloc(size_t, size_t);
void *sn_rust_realloc(void *, size_t, size_t, size_t);
void sn_rust_dealloc(void *, size_t, size_t);
static void *old;
SITE(00, sn_malloc(n))
SITE(01, sn_calloc(n / 8, 8))
SITE(02, sn_realloc(old, n))
SITE(03, sn_rust_alloc(64, n))
SITE(04, sn_rust_realloc(old, 64, 256, n))
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 100);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    old = site_00(100); took(0, 100);
    old = site_02(300); gave(0, 100); took(2, 300);
    if (r % 3) { sn_free(old); gave(2, 300); }
    void *p = site_01(800); took(1, 800);
    if (r % 3) { sn_free(p); gave(1, 800); }
    old = site_03(256); took(3, 256);
    old = site_04(512); gave(3, 256); took(4, 512);
    if (r % 3) { sn_rust_dealloc(old, 64, 512); gave(4, 512); }
  }
  report();
  return 0;
}
