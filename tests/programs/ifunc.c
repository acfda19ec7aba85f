/* A malloc that is chosen when the program starts: an indirect function. */
#include <stddef.h>
void *__libc_malloc(size_t);
static void *chosen(size_t n) { return __libc_malloc(n); }
static void *(*choose(void))(size_t) { return chosen; }
void *malloc(size_t n) __attribute__((ifunc("choose")));
