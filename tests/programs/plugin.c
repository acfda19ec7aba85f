/* A library that allocates. It is built several times; PLUGIN is the number of its site. */
#include <stdlib.h>
#define NAME2(n) site_##n
#define NAME(n) NAME2(n)
void *NAME(PLUGIN)(size_t n) {
  void *p = malloc(n);
  __asm__ volatile("" : "+r"(p) : : "memory");
  return p;
}
