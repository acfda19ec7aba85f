/* OPS: twenty sites at stack depths 4 to 30, log-normal sizes of 16 B to 64 KiB, lifetimes that differ by site.
 * Sites 00-15 malloc, 16-17 calloc, 18 malloc and realloc (two allocations, one stays allocated), 19 aligned_alloc. */
#include <math.h>
#include "truth.h"
enum { USED_SITES = 20, PLAN = 8192, SLOTS = 8192 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n)) SITE(04, malloc(n))
SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n)) SITE(08, malloc(n)) SITE(09, malloc(n))
SITE(10, malloc(n)) SITE(11, malloc(n)) SITE(12, malloc(n)) SITE(13, malloc(n)) SITE(14, malloc(n))
SITE(15, malloc(n)) SITE(16, calloc(1, n)) SITE(17, calloc(n / 8, 8)) SITE(19, aligned_alloc(64, n))
NOINLINE void *site_18(size_t n) {
  void *p = malloc(n / 2);
  KEEP(p);
  took(18, n / 2);
  p = realloc(p, n);
  KEEP(p);
  gave(18, n / 2);
  return p;
}
static void *(*const site[USED_SITES])(size_t) = {
    site_00, site_01, site_02, site_03, site_04, site_05, site_06, site_07, site_08, site_09,
    site_10, site_11, site_12, site_13, site_14, site_15, site_16, site_17, site_18, site_19};

static NOINLINE void *descend(int depth, int i, size_t n) {
  void *p = depth ? descend(depth - 1, i, n) : site[i](n);
  KEEP(p);
  return p;
}

static struct { uint32_t size; uint8_t site, depth; uint16_t slot; } plan[PLAN];
static struct { void *block; uint32_t size; uint8_t site; } slots[SLOTS];

static double uniform(uint64_t *state) { return ((double)(next_random(state) >> 11) + 0.5) / 9007199254740992.0; }
static void make_plan(void) {
  uint64_t seed = 42;
  for (int k = 0; k < PLAN; k++) {
    uint32_t i = (uint32_t)(uniform(&seed) * uniform(&seed) * USED_SITES); /* low numbers are more frequent */
    double normal = sqrt(-2 * log(uniform(&seed))) * cos(2 * M_PI * uniform(&seed));
    double bytes = exp(log(150.0 + 25.0 * i) + 1.3 * normal);
    uint32_t n = bytes < 16 ? 16 : bytes > 65536 ? 65536 : (uint32_t)bytes;
    if (i == 17) n = (n + 7) & ~7u;
    if (i == 18 && n < 32) n = 32;
    if (i == 19) n = (n + 63) & ~63u;
    plan[k].size = n; plan[k].site = (uint8_t)i; plan[k].depth = (uint8_t)(i * 26 / 19);
    /* A block lives until its slot is reused, so few slots mean a short lifetime. */
    uint32_t range = 1u << (4 + i % 10);
    plan[k].slot = (uint16_t)(next_random(&seed) % range + (SLOTS - range) * (i % 3) / 2);
  }
}
int main(int argc, char **argv) {
  uint64_t ops = argument(argc, argv, 1, 200000), seed = 7;
  make_plan();
  ready();
  for (uint64_t k = 0; k < ops; k++) {
    uint32_t j = (uint32_t)(next_random(&seed) % PLAN), i = plan[j].site, s = plan[j].slot, n = plan[j].size;
    if (slots[s].block) {
      free(slots[s].block);
      gave(slots[s].site, slots[s].size);
    }
    slots[s].block = descend(plan[j].depth, (int)i, n);
    slots[s].site = (uint8_t)i; slots[s].size = n;
    took((int)i, n);
  }
  report();
  return 0;
}
