/* An allocator on top of malloc, in a library of its own. */
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void *arena_take(void *arena, size_t size);
void *arena_take_zeroed(void *arena, size_t count, size_t size);
void *arena_resize(void *arena, void *block, size_t size);
void arena_give(void *arena, void *block);
/* Called when the arena allocates a chunk; it does not have to return. */
extern void (*arena_took_chunk)(void);
#ifdef __cplusplus
}
#endif
