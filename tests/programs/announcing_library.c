/* A library whose allocator announces its samples. */
#include "otel_memory.h"

static struct announcing heap;
void library_begins(uint64_t interval) { announcing_begins(&heap, interval, 0); }
void *library_take(uint64_t size) { return announced_take(&heap, size); }
void library_give(void *block) { announced_give(&heap, block); }
