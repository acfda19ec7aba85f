/* Four phases, each a step. 0: keeps 1,000 blocks of 1,000 bytes. 1: frees half of these; allocates 2,000 blocks of 500 bytes and keeps
 * 500 of them; allocates and frees 3,000 of 64 bytes. 2: frees 100 of the second kind, keeps 10 blocks of 30,000 bytes, and makes
 * a block of phase 0 twice as large. 3: frees what is left of phase 0. */
#include "truth.h"
enum { OLD = 1000, MADE = 2000, KEPT = 500, BRIEF = 3000, LATE = 10 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
NOINLINE static void *site_04(void *p, size_t n) {
  p = realloc(p, n);
  KEEP(p);
  return p;
}
static void *old[OLD], *made[MADE], *late[LATE];

static void release(void **blocks, int from, int to, int site, size_t size) {
  for (int i = from; i < to; i++) { free(blocks[i]); gave(site, size); }
}
int main(void) {
  ready();
  for (int i = 0; i < OLD; i++) { old[i] = site_00(1000); took(0, 1000); }
  step();
  release(old, 0, OLD / 2, 0, 1000);
  for (int i = 0; i < MADE; i++) { made[i] = site_01(500); took(1, 500); }
  release(made, KEPT, MADE, 1, 500);
  for (int i = 0; i < BRIEF; i++) { void *p = site_02(64); took(2, 64); free(p); gave(2, 64); }
  step();
  release(made, 0, 100, 1, 500);
  for (int i = 0; i < LATE; i++) { late[i] = site_03(30000); took(3, 30000); }
  gave(0, 1000);
  old[OLD - 1] = site_04(old[OLD - 1], 2000); took(4, 2000);
  step();
  release(old, OLD / 2, OLD - 1, 0, 1000);
  report();
  return 0;
}
