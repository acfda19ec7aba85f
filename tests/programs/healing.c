/* BLOCKS FREED OPS [MAPPED [REUSED]]: step 1 allocates BLOCKS blocks; step 2 makes and frees OPS more, then frees FREED of
 * step 1's. With MAPPED, step 1 maps that many blocks instead; of those that step 2 unmaps, REUSED get another mapping in
 * their place, of a file. */
#include "truth.h"
#include <fcntl.h>
enum { MOST = 100000, MAPPED_BYTES = 5000 };
SITE(00, malloc(n))
SITE(01, malloc(n))
SITE(02, mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
static void *blocks[MOST];
static void unmap(void *block, int reused) {
  if (munmap(block, MAPPED_BYTES)) die("cannot unmap");
  static int file = -1;
  if (reused && file < 0 && (file = open("/proc/self/exe", O_RDONLY)) < 0) die("cannot open");
  if (reused && mmap(block, MAPPED_BYTES, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, file, 0) != block) die("cannot reuse");
}
int main(int argc, char **argv) {
  uint64_t many = argument(argc, argv, 1, 200), freed = argument(argc, argv, 2, 150), ops = argument(argc, argv, 3, 5000);
  uint64_t mapped = argument(argc, argv, 4, 0), reused = argument(argc, argv, 5, 0);
  if (mapped) many = mapped;
  if (many > MOST || freed > many) die("too many blocks");
  int site = mapped ? 2 : 0;
  uint64_t size = mapped ? MAPPED_BYTES : 1000;
  ready();
  for (uint64_t k = 0; k < many; k++) { blocks[k] = mapped ? site_02(size) : site_00(size); took(site, size); }
  step();
  for (uint64_t k = 0; k < ops; k++) { free(site_01(50)); took(1, 50); gave(1, 50); }
  for (uint64_t k = 0; k < freed; k++) {
    if (mapped) unmap(blocks[k], k < reused);
    else free(blocks[k]);
    gave(site, size);
  }
  report();
  return 0;
}
