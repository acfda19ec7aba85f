/* Allocates a thousand blocks of 100 bytes. PAD: bytes that its text is longer, so that it ends where a test wants it to. */
#include <stdlib.h>
#ifndef PAD
#define PAD "0"
#endif
__asm__(".text\n.skip " PAD ", 0x90\n");
int main(void) {
  for (int i = 0; i < 1000; i++) {
    void *volatile block = malloc(100);
    (void)block;
  }
  return 0;
}
