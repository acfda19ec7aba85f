/* BLOCKS LEFT SIZE: BLOCKS blocks are allocated, all but LEFT of them are freed, and a quarter as many as were freed
 * are allocated and freed again. The peak in use is BLOCKS * SIZE bytes; the report states what is left. */
#include "truth.h"
enum { MOST = 100000 };
SITE(00, malloc(n))
SITE(01, malloc(n))
static void *blocks[MOST];
int main(int argc, char **argv) {
  uint64_t many = argument(argc, argv, 1, 2000), left = argument(argc, argv, 2, 100), size = argument(argc, argv, 3, 1000);
  if (many > MOST || left > many) die("too many blocks");
  ready();
  for (uint64_t k = 0; k < many; k++) { blocks[k] = site_00(size); took(0, size); }
  for (uint64_t k = left; k < many; k++) { free(blocks[k]); gave(0, size); }
  uint64_t again = left + (many - left) / 4;
  for (uint64_t k = left; k < again; k++) { blocks[k] = site_01(size); took(1, size); }
  for (uint64_t k = left; k < again; k++) { free(blocks[k]); gave(1, size); }
  report();
  return 0;
}
