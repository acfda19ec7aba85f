/* An allocator of indirect functions, whose code is chosen when the program starts. Memory is never reused.
 * With LATE the resolver of malloc computes its choice, which static analysis of its code cannot find. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static char store[256 << 20] __attribute__((aligned(64)));
static size_t used;
static inline void *take(size_t alignment, size_t size) {
  size_t at = (used + 16 + alignment - 1) & ~(alignment - 1);
  if (size > sizeof store || at + size > sizeof store) return 0;
  used = at + size;
  *(size_t *)(store + at - 16) = size;
  return store + at;
}
void *malloc(size_t);
void free(void *);
static void *malloc_plain(size_t size) { return take(16, size); }
static void *malloc_wide(size_t size) { return take(64, size); }
/* Calls the chosen function, as an outer function does. */
static void *calloc_plain(size_t count, size_t size) {
  if (size && count > SIZE_MAX / size) return 0;
  return malloc(count * size);
}
static void *realloc_plain(void *old, size_t size) {
  void *block = malloc(size);
  if (block && old) {
    size_t was = *(size_t *)((char *)old - 16);
    memcpy(block, old, was < size ? was : size);
    free(old);
  }
  return block;
}
static void *aligned_plain(size_t alignment, size_t size) { return take(alignment < 16 ? 16 : alignment, size); }
static void free_plain(void *block) { __asm__ volatile("" : : "r"(block) : "memory"); }
static void free_checked(void *block) { __asm__ volatile("nop" : : "r"(block) : "memory"); }

static int is_wide(void) {
#ifdef __x86_64__
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse2") != 0;
#else
  return 1;
#endif
}
#ifdef LATE
static void *(*choose_malloc(void))(size_t) {
  volatile intptr_t wide = is_wide();
  return (void *(*)(size_t))((intptr_t)malloc_plain + ((intptr_t)malloc_wide - (intptr_t)malloc_plain) * wide);
}
#else
/* The two forms that compilers generate for a choice: a branch with calls in between, and no branch. */
static void *(*choose_malloc(void))(size_t) {
  if (!is_wide()) return malloc_plain;
  return malloc_wide;
}
#endif
static void (*choose_free(void))(void *) { return is_wide() ? free_checked : free_plain; }
static void *(*choose_calloc(void))(size_t, size_t) { return calloc_plain; }
static void *(*choose_realloc(void))(void *, size_t) { return realloc_plain; }
static void *(*choose_aligned(void))(size_t, size_t) { return aligned_plain; }
#define CHOSEN_BY(resolver) __attribute__((visibility("default"), ifunc(#resolver)))
CHOSEN_BY(choose_malloc) void *malloc(size_t);
CHOSEN_BY(choose_free) void free(void *);
CHOSEN_BY(choose_calloc) void *calloc(size_t, size_t);
CHOSEN_BY(choose_realloc) void *realloc(void *, size_t);
CHOSEN_BY(choose_aligned) void *aligned_alloc(size_t, size_t);
