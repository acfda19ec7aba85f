/* THREADS OPS: threads allocate and free checksummed blocks without a pause until the first line; then a step, and OPS pairs in
 * the first thread, half of which stay. Ends itself if a block is not as it was. */
#include "truth.h"
enum { MOST = 64, BLOCKS = 64 };
SITE(00, malloc(n))
static volatile int over;
struct block { uint64_t size, sum; unsigned char bytes[]; };

static uint64_t sum_of(const struct block *b) {
  uint64_t sum = b->size;
  for (uint64_t k = 0; k < b->size; k++) sum = sum * 31 + b->bytes[k];
  return sum;
}
static NOINLINE struct block *make(uint64_t size, uint64_t seed) {
  struct block *b = seed & 1 ? malloc(sizeof *b + size) : calloc(1, sizeof *b + size);
  KEEP(b);
  b->size = size;
  for (uint64_t k = 0; k < size; k++) b->bytes[k] = (unsigned char)(seed >> (k % 56));
  b->sum = sum_of(b);
  return b;
}
static NOINLINE struct block *grow(struct block *b) {
  uint64_t old = b->size, size = old * 2 + 1;
  if (b->sum != sum_of(b)) die("a block changed");
  b = realloc(b, sizeof *b + size);
  KEEP(b);
  if (b->size != old || b->sum != sum_of(b)) die("realloc changed a block");
  for (uint64_t k = old; k < size; k++) b->bytes[k] = (unsigned char)k;
  b->size = size;
  b->sum = sum_of(b);
  return b;
}
static void *churn(void *number) {
  static __thread struct block *blocks[BLOCKS];
  uint64_t state = (uint64_t)(intptr_t)number;
  for (uint64_t turn = 0; !over; turn++) {
    uint64_t r = next_random(&state);
    struct block **slot = &blocks[r % BLOCKS];
    if (*slot && r >> 8 & 1) {
      *slot = grow(*slot);
    }
    if (*slot) {
      if ((*slot)->sum != sum_of(*slot)) die("a block changed");
      free(*slot);
    }
    *slot = make(r >> 16 & 255, r);
    if (turn % 16 == 0) usleep(1000);
  }
  return 0;
}
int main(int argc, char **argv) {
  uint64_t threads = argument(argc, argv, 1, 4), ops = argument(argc, argv, 2, 2000);
  pthread_t ids[MOST];
  if (threads > MOST) die("too many threads");
  for (uint64_t i = 0; i < threads; i++) pthread_create(&ids[i], 0, churn, (void *)(intptr_t)(i + 1));
  ready();
  over = 1;
  for (uint64_t i = 0; i < threads; i++) pthread_join(ids[i], 0);
  step();
  for (uint64_t k = 0; k < ops; k++) {
    size_t size = 32 + k % 64;
    void *p = site_00(size);
    took(0, size);
    if (k % 2) {
      free(p);
      gave(0, size);
    }
  }
  report();
  return 0;
}
