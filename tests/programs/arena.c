/* An allocator on top of malloc. Its chunks come from an exported function, which others might call too. Blocks larger
 * than a chunk come from malloc by a tail jump. Chunks have a list of free blocks of each size. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "arena.h"
enum { CHUNK = 16 << 10, HEAD = 16, CLASSES = CHUNK / 16 };
static __thread char *next, *end;
static __thread void *free_blocks[CLASSES + 1];
void (*arena_took_chunk)(void);
static void *(*volatile above)(size_t) = malloc;
__attribute__((noinline)) char *arena_chunk(size_t size) {
  char *scratch = strdup("libc is a caller too, and here an inner one");
  char *chunk = calloc(1, size);
  free(scratch);
  if (arena_took_chunk) arena_took_chunk();
  return chunk;
}
static size_t rounded(size_t size) { return (size + HEAD + 15) & ~(size_t)15; }
void *arena_take(void *arena, size_t size) {
  (void)arena;
  if (size > CHUNK - HEAD) return above(size);
  size_t whole = rounded(size);
  char *block = free_blocks[whole / 16];
  if (block) free_blocks[whole / 16] = *(void **)block;
  else {
    if (!next || (size_t)(end - next) < whole) {
      next = arena_chunk(CHUNK);
      end = next + CHUNK;
    }
    block = next + HEAD;
    next += whole;
  }
  *(uint64_t *)(block - 8) = size;
  return block;
}
void *arena_take_zeroed(void *arena, size_t count, size_t size) {
  void *block = arena_take(arena, count * size);
  return memset(block, 0, count * size);
}
void *arena_resize(void *arena, void *block, size_t size) {
  void *fresh = arena_take(arena, size);
  if (block) {
    uint64_t old = *(uint64_t *)((char *)block - 8);
    memcpy(fresh, block, old < size ? old : size);
    arena_give(arena, block);
  }
  return fresh;
}
void arena_give(void *arena, void *block) {
  (void)arena;
  size_t whole = rounded(*(uint64_t *)((char *)block - 8));
  *(void **)block = free_blocks[whole / 16];
  free_blocks[whole / 16] = block;
}
