/* [MIB]: Memory of every kind, all of it written to: 24 MiB of the heap before READY, and MIB that are mapped and no allocator's; afterwards 8 MiB in blocks of the main heap, 8 MiB
 * in another thread's arena, half of each freed again from the middle; 4 MiB of a thread's stack, 12 MiB shared, 2 MiB of
 * executable memory, and 6 MiB that are mapped and no allocator's. */
#include "truth.h"
#include <sys/mman.h>
#include <string.h>
enum { MIB = 1 << 20, BLOCK = 4096, BLOCKS = 2048 };
SITE(00, malloc(n)) SITE(01, malloc(n))
static pthread_barrier_t filled;

static void fill(int site, void *(*of)(uint64_t)) {
  static __thread void *blocks[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = memset(of(BLOCK), 1, BLOCK);
    took(site, BLOCK);
  }
  /* The last ones stay, so that the allocator keeps what lies before them. */
  for (int i = 0; i < BLOCKS / 2; i++) { free(blocks[i]); gave(site, BLOCK); }
}
__attribute__((noinline)) static void deepen(void) {
  volatile char deep[4 * MIB];
  for (int i = 0; i < 4 * MIB; i += 4096) deep[i] = 1;
}
static void *other(void *unused) {
  deepen();
  fill(1, site_01);
  pthread_barrier_wait(&filled);
  for (;;) pause();
  return unused;
}
static void *mapped(int bytes, int protection, int flags) {
  void *p = mmap(0, bytes, protection | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) die("mmap");
  return memset(p, 1, bytes);
}
int main(int argc, char **argv) {
  int unseen = (int)argument(argc, argv, 1, 0);
  char *volatile old = malloc(24 * MIB);
  memset(old, 1, 24 * MIB);
  if (unseen) mapped(unseen * MIB, PROT_READ, MAP_PRIVATE);
  ready();
  fill(0, site_00);
  pthread_t id;
  pthread_barrier_init(&filled, 0, 2);
  pthread_create(&id, 0, other, 0);
  mapped(12 * MIB, PROT_READ, MAP_SHARED);
  mapped(2 * MIB, PROT_READ | PROT_EXEC, MAP_PRIVATE);
  mapped(6 * MIB, PROT_READ, MAP_PRIVATE);
  pthread_barrier_wait(&filled);
  report();
  return 0;
}
