/* The names of snmalloc's C and Rust interfaces, on top of a store of its own that never reuses memory. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default"), noinline))
static char store[64 << 20] __attribute__((aligned(64)));
static size_t used;
static void *take(size_t alignment, size_t size) {
  size_t at = (used + 16 + alignment - 1) & ~(alignment - 1);
  if (at + size > sizeof store) return 0;
  used = at + size;
  *(size_t *)(store + at - 16) = size;
  return store + at;
}
EXPORT void *sn_malloc(size_t size) { return take(16, size); }
EXPORT void *sn_calloc(size_t count, size_t size) { return take(16, count * size); }
EXPORT void *sn_realloc(void *old, size_t size) {
  void *block = sn_malloc(size);
  if (block && old) {
    size_t was = *(size_t *)((char *)old - 16);
    memcpy(block, old, was < size ? was : size);
  }
  return block;
}
EXPORT void sn_free(void *block) { __asm__ volatile("" : : "r"(block) : "memory"); }
EXPORT void *sn_rust_alloc(size_t alignment, size_t size) { return take(alignment < 16 ? 16 : alignment, size); }
EXPORT void sn_rust_dealloc(void *block, size_t alignment, size_t size) {
  __asm__ volatile("" : : "r"(block), "r"(alignment), "r"(size) : "memory");
}
EXPORT void *sn_rust_realloc(void *old, size_t alignment, size_t was, size_t size) {
  void *block = sn_rust_alloc(alignment, size);
  if (block) memcpy(block, old, was < size ? was : size);
  return block;
}
