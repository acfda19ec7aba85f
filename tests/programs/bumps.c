/* An allocator of its own in a library: a list of free blocks of one size, from a pool that grows by mmap. It calls out, so
 * that no caller relies on registers. */
#include <stddef.h>
#include <sys/mman.h>
static struct block { struct block *next; } *free_blocks;
enum { BLOCK = 512, POOL = 1 << 20 };
static __attribute__((noinline)) void grow(void) {
  char *pool = mmap(0, POOL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pool == MAP_FAILED) return;
  for (char *at = pool; at < pool + POOL; at += BLOCK) {
    struct block *block = (struct block *)at;
    block->next = free_blocks;
    free_blocks = block;
  }
}
void *bumps_take(size_t size) {
  if (size > BLOCK) return 0;
  if (!free_blocks) grow();
  struct block *block = free_blocks;
  if (block) free_blocks = block->next;
  return block;
}
void bumps_give(void *p) {
  struct block *block = p;
  if (!block) return;
  madvise(p, 0, MADV_NORMAL);
  block->next = free_blocks;
  free_blocks = block;
}
