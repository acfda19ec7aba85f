/* What is in use from before READY, and what is free then: blocks of many sizes in the main arena and in another thread's, two large
 * ones, and every third block freed. Afterwards half of the older blocks are freed, and site 0 allocates. Each step prints glibc's own
 * figures: SUM, what is in use with headers (and what caches of threads have), what of it is older, what is free, and what of that is in
 * fast bins. */
#include "truth.h"
#include <malloc.h>
enum { BLOCKS = 20000, NEW = 3000 };
SITE(00, malloc(n))
static void *blocks[2][BLOCKS], *large[2], *made[NEW];
static pthread_barrier_t filled;

static uint64_t size_of(void *p) {
  uint64_t usable = malloc_usable_size(p);
  return usable >= 1 << 20 ? usable + 16 : usable + 8;
}
static void fill(int arena) {
  for (uint64_t i = 0; i < BLOCKS; i++) {
    uint64_t size = 1 + i * 37 % 3000;
    blocks[arena][i] = memset(malloc(size), 1, size);
  }
  for (int i = 0; i < BLOCKS; i += 3) { free(blocks[arena][i]); blocks[arena][i] = 0; }
}
static void *other(void *unused) {
  fill(1);
  pthread_barrier_wait(&filled);
  for (;;) pause();
  return unused;
}
static void sums(void) {
  struct mallinfo2 all = mallinfo2();
  uint64_t older = 0;
  for (int arena = 0; arena < 2; arena++)
    for (int i = 0; i < BLOCKS; i++) if (blocks[arena][i]) older += size_of(blocks[arena][i]);
  for (int i = 0; i < 2; i++) if (large[i]) older += size_of(large[i]);
  /* The other arena's own header counts as in use. */
  put_text("SUM "); put_number(all.uordblks - 0x8d0 + all.hblkhd);
  put_text(" "); put_number(older);
  put_text(" "); put_number(all.fordblks); put_text(" "); put_number(all.fsmblks); put_text("\n");
}
int main(void) {
  pthread_t id;
  fill(0);
  pthread_barrier_init(&filled, 0, 2);
  pthread_create(&id, 0, other, 0);
  pthread_barrier_wait(&filled);
  for (int i = 0; i < 2; i++) large[i] = memset(malloc(5000000), 1, 5000000);
  ready();
  sums();
  wait_line();
  for (int arena = 0; arena < 2; arena++)
    for (int i = 0; i < BLOCKS / 2; i++) { free(blocks[arena][i]); blocks[arena][i] = 0; }
  free(large[0]);
  large[0] = 0;
  for (uint64_t i = 0; i < NEW; i++) {
    uint64_t size = 1 + i * 7919 % 20000;
    made[i] = memset(site_00(size), 1, size);
    took(0, size);
  }
  sums();
  report();
  return 0;
}
