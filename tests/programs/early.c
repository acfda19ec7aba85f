/* With -DLIBRARY, a library whose constructor allocates ten blocks. Else a program that frees half of them, allocates CALLS
 * more, has a child do the same, and ends with status 3. */
#include <stdlib.h>
#ifdef LIBRARY
void *early_blocks[10];
__attribute__((constructor, noinline)) static void early(void) {
  for (int i = 0; i < 10; i++) early_blocks[i] = malloc(1000);
}
#else
#include <sys/wait.h>
#include <unistd.h>
extern void *early_blocks[10];
static __attribute__((noinline)) void late(void) {
  for (int i = 0; i < 100; i++) free(malloc(100));
}
int main(void) {
  for (int i = 0; i < 5; i++) free(early_blocks[i]);
  late();
  pid_t child = fork();
  if (!child) {
    late();
    _exit(0);
  }
  waitpid(child, 0, 0);
  return 3;
}
#endif
