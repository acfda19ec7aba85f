# The shared code of the blob. Offsets in braces come from blob.rs. The frame of the slow paths, from the stack pointer:
#   0 offset  8 interval  16 old block  24 flags  32 slot  40 size  48 function  56 six arguments (and the result, at
#   last, in place of the sixth)  104 return address
# Writes use `lock` where other threads or signal handlers may write too; the paths here are rare.

.macro address register, offset
    lea \register, [rip + .Lcode + (\offset) - {CODE}]
.endm

# Makes the frame. rax: size, r10: slot, r11: function.
.macro save
    push r9
    push r8
    push rcx
    push rdx
    push rsi
    push rdi
    push r11
    push rax
    push r10
    push 0
    push 0
    push 0
    push 0
.endm

.macro load_arguments
    mov rdi, [rsp + 56]
    mov rsi, [rsp + 64]
    mov rdx, [rsp + 72]
    mov rcx, [rsp + 80]
    mov r8, [rsp + 88]
    mov r9, [rsp + 96]
.endm

# rax: size -> trials. Clobbers rcx.
.macro trials
    address rcx, {HEADER}
    cmp dword ptr [rcx + {H_CRITERION}], {CRITERION_BYTES}
    je 7f
    mov eax, 1
7:  cmp rax, 1
    adc rax, 0
.endm

# -> r8: the first of the window of entries for the block in rdi. Clobbers rcx.
.macro window
    movabs rcx, 0x9e3779b97f4a7c15
    mov r8, rdi
    imul r8, rcx
    shr r8, 32
    address rcx, {HEADER}
    and r8, [rcx + {H_SET_MASK}]
    address rcx, {SET}
    add r8, rcx
.endm

# -> r9: the filter's byte for the block in rdi. Clobbers rcx.
.macro filter_byte
    mov rcx, rdi
    mov r9, rdi
    shr rcx, 4
    shr r9, 22
    xor r9d, ecx
    and r9d, {FILTER_MASK}
    address rcx, {FILTER}
    add r9, rcx
.endm

# r10: slot, r11: function -> r10 for a site; rax: the thread's calls. Waits while no site may be passed. Clobbers rcx.
.macro identify
    call .Lpassing
    mov rax, [r10 + {S_CALLS}]
    address rcx, {SHARED}
    cmp r10, rcx
    jne 7f
    or dword ptr [rsp + 24], {SHARED_SLOT}
7:  mov ecx, [r11 + {F_NUMBER}]
    mov r10d, [rsp + 24]
    shl r10, 32
    or r10, rcx
.endm

# A site: a one-byte no-op, which the kernel emulates, and a four-byte one. A single five-byte no-op would not do: the
# kernel (6.18) turns that into a call of a trampoline that a forked child does not have.
.macro site name
    .p2align 3, 0x90
\name:
    .byte 0x90, 0x0f, 0x1f, 0x40, 0x00
.endm

.pushsection .rodata.heapbpf_inline, "a", @progbits
.p2align 6
.globl heapbpf_inline_code
.hidden heapbpf_inline_code
heapbpf_inline_code:
.Lcode:

# ---- allocation
.p2align 4, 0x90
.Lallocation_ends_countdown:
    save
    trials
    mov rdx, [r10 + {S_COUNTDOWN}]
    test rdx, rdx
    jg .Larmed
    add rdx, rax
    jmp .Ldecision
# A signal handler ran between this call's countdown and here, and drew anew. The success still belongs to this call,
# but at which of its trials is not known any more.
.Larmed:
    xor r8d, r8d
    mov r9, [r10 + {S_INTERVAL}]
    call .Lcounts
    jmp .Ldecided

.p2align 4, 0x90
.Lallocation:
    save
.Lcounting:
    test rax, rax
    jnz 1f
    test dword ptr [r11 + {F_FLAGS}], {ZERO_FREES}
    jz 1f
    movzx ecx, byte ptr [r11 + {F_OLD}]
    cmp qword ptr [rsp + rcx * 8 + 56], 0
    je 1f
    lock inc qword ptr [r10 + {S_ZERO_REALLOCS}]
    jmp .Lpass
1:  mov rcx, rax
    shr rcx, 47
    jnz .Lrefusal
    lock inc qword ptr [r10 + {S_CALLS}]
    lock add [r10 + {S_BYTES}], rax
    trials
    mov rdx, rax
    neg rdx
    lock xadd [r10 + {S_COUNTDOWN}], rdx
.Ldecision:
    call .Ldecide
.Ldecided:
    jnc 2f
    mov [rsp], r8
    mov [rsp + 8], r9
    or dword ptr [rsp + 24], {SAMPLED}
    lock inc qword ptr [r10 + {S_SAMPLED}]
    mov rcx, [rsp + 40]
    lock add [r10 + {S_SAMPLED_BYTES}], rcx
    mov rcx, [r10 + {S_CALLS}]
    mov [r10 + {S_SAMPLED_CALL}], rcx
    jmp .Lawait
2:  cmp qword ptr [rsp + 40], {LARGE_BYTES}
    jae .Lawait
    cmp qword ptr [rsp + 16], 0
    jne .Lawait
    mov r11, [rsp + 48]
    test dword ptr [r11 + {F_FLAGS}], {OF_OBJECTS}
    jnz .Lawait
    jmp .Lpass

# A call that must fail.
.p2align 4, 0x90
.Lrefused:
    save
.Lrefusal:
    # malloc refuses it, too, and counts it.
    test dword ptr [r11 + {F_FLAGS}], {OF_OBJECTS}
    jnz .Lpass
    # As the probes count it: sampled, and failed.
    lock inc qword ptr [r10 + {S_CALLS}]
    lock inc qword ptr [r10 + {S_SAMPLED}]
    lock inc qword ptr [r10 + {S_FAILED}]
.Lpass:
    load_arguments
    mov r11, [rsp + 48]
    add rsp, {FRAME}
# r11: function. Goes on in the original.
.Loriginal:
    mov r10d, [r11 + {F_ORIGINAL}]
    address r11, 0
    add r10, r11
    jmp r10
# r10 as at a site. Goes on in the original.
.Lby_index:
    shr r10d, 16
    shl r10d, 5
    address r11, {FUNCTIONS}
    add r11, r10
    jmp .Loriginal

# ---- call the original, and look at its outcome
.Lawait:
    mov r11, [rsp + 48]
    mov r10d, [r11 + {F_ORIGINAL}]
    mov eax, [r11 + {F_FLAGS}]
    test eax, {OF_OBJECTS}
    jz 3f
    mov rcx, [rsp + 32]
    mov [rcx + {S_INSIDE}], rsp
3:  test eax, {THROWS}
    jz 1f
    mov r10d, [r11 + {F_TWIN}]
    test r10d, r10d
    jz .Lunseen
1:  load_arguments
    test eax, {REFERENCE_SECOND}
    cmovnz rsi, rsp
    test eax, {REFERENCE_THIRD}
    cmovnz rdx, rsp
    test eax, {SWAPPED}
    jz 3f
    xchg rdi, rsi
3:
    address r11, 0
    add r11, r10
.Lframed:
    call r11
    # A scan of the stack must not take this for a return address.
    mov qword ptr [rsp - 8], 0
    mov r11, [rsp + 48]
    mov r10, [rsp + 32]
    mov rdi, rax
    test dword ptr [r11 + {F_FLAGS}], {OF_OBJECTS}
    jz 3f
    mov qword ptr [r10 + {S_INSIDE}], 0
3:  test dword ptr [r11 + {F_FLAGS}], {OUT}
    jz 2f
    xor edi, edi
    test eax, eax
    jnz 2f
    mov rdi, [rsp + 56]
    mov rdi, [rdi]
2:  test rdi, rdi
    jz .Lfailure
    mov [rsp + 96], rax
    test dword ptr [rsp + 24], {SAMPLED}
    jz 4f
    lock inc qword ptr [r10 + {S_REPORTED}]
    call .Linsert
    jnc .Ltell
    or dword ptr [rsp + 24], {UNTRACKED}
.Ltell:
    identify
    mov rdx, rax
    mov rax, [rsp + 96]
    mov rcx, [rsp]
    mov r8, [rsp + 8]
    mov r9, [rsp + 16]
    mov rsi, [rsp + 40]
    xor r11d, r11d
    add rsp, {FRAME}
.Lframed_end:
site .Lsite_result
    test r11d, r11d
    jnz .Lby_index
    ret
# An unsampled call: reported only if it took a sampled block.
4:  cmp qword ptr [rsp + 16], 0
    jne .Ltell
5:  mov rax, [rsp + 96]
    add rsp, {FRAME}
    ret

.Lfailure:
    mov rcx, [rsp + 40]
    lock sub [r10 + {S_BYTES}], rcx
    test dword ptr [rsp + 24], {SAMPLED}
    jz 1f
    lock inc qword ptr [r10 + {S_FAILED}]
    lock sub [r10 + {S_SAMPLED_BYTES}], rcx
    jmp 2f
1:  lock inc qword ptr [r10 + {S_UNSAMPLED_FAILED}]
2:  # The twin failed; the function itself may throw.
    test dword ptr [r11 + {F_FLAGS}], {THROWS}
    jnz .Lthrowing
    mov [rsp + 96], rax
    mov rdi, [rsp + 16]
    test rdi, rdi
    jz 5b
    lock dec qword ptr [r10 + {S_FREES_MATCHED}]
    mov dword ptr [rsp + 24], {FAILED}
    call .Linsert
    jnc 3f
    or dword ptr [rsp + 24], {UNTRACKED}
3:  xor edi, edi
    jmp .Ltell

# The outcome of the function itself will not be seen; an old block is assumed to stay in use.
.Lthrowing:
    mov rdi, [rsp + 16]
    test rdi, rdi
    jz .Lpass
    lock dec qword ptr [r10 + {S_FREES_MATCHED}]
    mov dword ptr [rsp + 24], {FAILED}
    call .Linsert
    jnc 1f
    or dword ptr [rsp + 24], {UNTRACKED}
1:  identify
    load_arguments
    mov r9, [rsp + 16]
    mov r11d, 1
    add rsp, {FRAME}
    jmp .Lsite_result

.Lunseen:
    test dword ptr [rsp + 24], {SAMPLED}
    jz .Lpass
    mov r10, [rsp + 32]
    lock inc qword ptr [r10 + {S_REPORTED}]
    identify
    load_arguments
    mov rax, [rsp + 8]
    shl rax, 32
    or rax, [rsp]
    mov r11, [rsp + 40]
    add rsp, {FRAME}
site .Lsite_unseen
    jmp .Lby_index

# ---- a block that may be sampled is freed
.p2align 4, 0x90
.Lfree:
    save
    movzx ecx, byte ptr [r11 + {F_OLD}]
    mov rdi, [rsp + rcx * 8 + 56]
    call .Lremove
    jnc .Lpass
    call .Lslot
    mov r11, [rsp + 48]
    lock inc qword ptr [r10 + {S_FREES_MATCHED}]
.Lfreeing:
    mov [rsp + 16], rdi
    identify
    load_arguments
    mov r11, [rsp + 16]
    add rsp, {FRAME}
site .Lsite_freeing
    jmp .Lby_index

# ---- a block that may be sampled is reallocated
# r11: function, with a frame. -> r10: slot, rdi: old block, rax: size; carry flag: the size does not fit.
.macro prepare
    call .Lslot
    mov r11, [rsp + 48]
    mov [rsp + 32], r10
    movzx ecx, byte ptr [r11 + {F_OLD}]
    mov rdi, [rsp + rcx * 8 + 56]
    movzx ecx, byte ptr [r11 + {F_SIZE}]
    mov rax, [rsp + rcx * 8 + 56]
    movzx ecx, byte ptr [r11 + {F_TIMES}]
    cmp ecx, {NO_ARGUMENT}
    je 7f
    mul qword ptr [rsp + rcx * 8 + 56]
7:  mov [rsp + 40], rax
.endm

.p2align 4, 0x90
.Lreallocation:
    save
    prepare
    # mul sets the carry flag if the size does not fit; comparing equal numbers clears it.
    jc .Lrefusal
    mov rcx, rax
    shr rcx, 47
    jnz .Lrefusal
    call .Lremove
    mov rax, [rsp + 40]
    jnc .Lreallocated
    lock inc qword ptr [r10 + {S_FREES_MATCHED}]
    call .Linside
    jc .Lfreeing
    test rax, rax
    jnz 1f
    test dword ptr [r11 + {F_FLAGS}], {ZERO_FREES}
    jz 1f
    lock inc qword ptr [r10 + {S_ZERO_REALLOCS}]
    jmp .Lfreeing
1:  mov [rsp + 16], rdi
    identify
    inc rax
    load_arguments
    mov r11, [rsp + 16]
    add rsp, {FRAME}
site .Lsite_reallocating
    shr r10d, 16
    shl r10d, 5
    address r11, {FUNCTIONS}
    add r11, r10
    save
    prepare
    mov [rsp + 16], rdi
    jmp .Lcounting

# The old block is not sampled. A call by an object allocator is part of that allocator's call.
.Lreallocated:
    call .Linside
    jc .Lpass
    jmp .Lcounting

# ---- subroutines
# r10: slot, r11: function -> carry flag: the call is part of an object allocator's call, or has no slot in which to
# mark its inner calls. Clobbers rcx.
.Linside:
    test dword ptr [r11 + {F_FLAGS}], {OF_OBJECTS}
    jz 1f
    address rcx, {SHARED}
    cmp r10, rcx
    je 2f
1:  mov rcx, [r10 + {S_INSIDE}]
    test rcx, rcx
    jz 3f
    sub rcx, rsp
    cmp rcx, {INSIDE_BYTES}
    ja 3f
2:  stc
    ret
3:  clc
    ret

# Counts a site that is about to be passed, and waits while that is more than the daemon has granted. Clobbers rax, rcx.
.Lpassing:
    address rcx, {CONTROL}
    cmp qword ptr [rcx + {C_GRANTED}], 0
    je 1f
    mov eax, 1
    lock xadd [rcx + {C_PASSED}], rax
    cmp rax, [rcx + {C_GRANTED}]
    jae .Lwaiting
1:  ret

# rax: sites that were passed before, rcx: control page.
.Lwaiting:
    push rdx
    push rdi
    address rdi, {STATE}
    cmp qword ptr [rdi + {T_MAY_WAIT}], 0
    je 3f
    xor edx, edx
1:  mov rdi, [rcx + {C_GRANTED}]
    test rdi, rdi
    jz 3f
    cmp rax, rdi
    jb 3f
    cmp rdi, [rcx + {C_GIVEN_UP}]
    je 3f
    pause
    inc rdx
    test edx, {PAUSES_AT_ONCE} - 1
    jnz 1b
    mov edi, {PAUSES_AT_ONCE}
    lock xadd [rcx + {C_PAUSES}], rdi
    cmp rdi, [rcx + {C_PAUSES_END}]
    jae 2f
    cmp rdx, [rcx + {C_MOST_PAUSES}]
    jb 1b
2:  mov rdi, [rcx + {C_GRANTED}]
    mov [rcx + {C_GIVEN_UP}], rdi
3:  pop rdi
    pop rdx
    ret

# r10: slot, rax: trials, rdx: trials until the next success before this call -> carry flag if sampled, r8: offset, r9:
# interval. Keeps rax, r10. If nothing was drawn before, the trials come from a new draw.
.Ldecide:
    cmp qword ptr [r10 + {S_INTERVAL}], 0
    je 1f
    test rdx, rdx
    jg 2f
1:  call .Lnext_draw
2:  cmp rax, rdx
    jge 3f
    sub rdx, rax
    mov [r10 + {S_COUNTDOWN}], rdx
    clc
    ret
3:  lea r8, [rdx - 1]
    push r8
    mov r9, [r10 + {S_INTERVAL}]
    push r9
    call .Lnext_draw
    mov [r10 + {S_COUNTDOWN}], rdx
    pop r9
    pop r8
# r9: interval -> carry flag: a success counts. Clobbers rcx.
.Lcounts:
    address rcx, {CONTROL}
    cmp qword ptr [rcx + {C_PAUSED}], 1
    jae 4f
    cmp r9, 1
    cmc
    ret
4:  clc
    ret

# r10: slot -> rdx: trials until the next success. Keeps rax, r10.
.Lnext_draw:
    push rax
    mov rax, [r10 + {S_RANDOM}]
    test rax, rax
    jnz 1f
    call .Lseed
1:  mov rcx, rax
    shr rcx, 12
    xor rax, rcx
    mov rcx, rax
    shl rcx, 25
    xor rax, rcx
    mov rcx, rax
    shr rcx, 27
    xor rax, rcx
    mov [r10 + {S_RANDOM}], rax
    movabs rdi, 0x2545f4914f6cdd1d
    imul rdi, rax
    address rsi, {CONTROL}
    mov [rsi + {C_DRAWN}], rax
    mov ecx, [rsi + {C_DRAW}]
    and ecx, {DRAWS_MASK}
    lea rcx, [rcx + rcx * 2]
    lea rsi, [rsi + rcx * 8 + {C_DRAWS}]
    mov rcx, [rsi]
    mov [r10 + {S_INTERVAL}], rcx
    mov eax, {LARGE_BYTES}
    test rcx, rcx
    jz 2f
    call .Ldraw
2:  mov rdx, rax
    pop rax
    ret

# r10: slot -> rax: the initial state of its random numbers, as rng::seed(). A forked child begins with empty slots, as
# its parent did, so its first thread changes the seed. Clobbers rcx, rdx, rsi, rdi.
.Lseed:
    address rsi, {CONTROL}
    address rdx, {STATE}
    mov edi, 1
    lock xadd [rdx + {T_THREADS}], rdi
    mov rax, [rsi + {C_SEED}]
    test rax, rax
    jz 3f
    test rdi, rdi
    jnz 5f
    cmp qword ptr [rdx + {T_IS_ORIGINAL}], 0
    jne 5f
    add rax, [rsi + {C_DRAWN}]
    call .Lrandom_word
    jnc 2f
    add rax, rcx
2:  call .Lmix
    cmp rax, 1
    adc rax, 0
    mov [rsi + {C_SEED}], rax
    jmp 5f
3:  call .Lrandom_word
    mov rax, rcx
    jc 5f
    mov rax, [r10]
    add rax, rsp
5:  call .Lmix
    add rax, rdi
    call .Lmix
    cmp rax, 1
    adc rax, 0
    ret

# -> rcx: a random number of the machine; carry flag if there is one. Clobbers rdx.
.Lrandom_word:
    address rdx, {HEADER}
    test dword ptr [rdx + {H_FLAGS}], {HEADER_RDRAND}
    jz 2f
    mov edx, 16
3:  rdrand rcx
    jc 2f
    dec edx
    jnz 3b
2:  ret

# rax: splitmix64's step. Clobbers rcx, rdx.
.Lmix:
    movabs rcx, 0x9e3779b97f4a7c15
    add rax, rcx
    mov rdx, rax
    shr rdx, 30
    xor rax, rdx
    movabs rcx, 0xbf58476d1ce4e5b9
    imul rax, rcx
    mov rdx, rax
    shr rdx, 27
    xor rax, rdx
    movabs rcx, 0x94d049bb133111eb
    imul rax, rcx
    mov rdx, rax
    shr rdx, 31
    xor rax, rdx
    ret

# fn(random: u64, constants: *const DrawConstants) -> u64, as geometric::draw(). Clobbers rcx, rdx, r8, r9, r11.
.p2align 4, 0x90
.Ldraw:
    mov rcx, [rsi]
    cmp rcx, 2
    jae 1f
    cmp rcx, 1
    mov eax, 1
    je 3f
    mov rax, -1
    ret
1:  lea rax, [rdi + 1]
    test rax, rax
    jz 2f
    bsr rcx, rax
    xor ecx, 63
    mov r8, rax
    shl r8, cl
    btr r8, 63
    mov r9, r8
    shr r9, 56
    shl r8, 8
    shr r8, 32
    address rdx, {RECIPROCALS}
    imul r8, [rdx + r9 * 8]
    shr r8, 32
    mov rdx, r8
    imul rdx, rdx
    shr rdx, 32
    mov r11, rdx
    imul r11, r8
    shr r11, 32
    shr rdx, 8
    sub r8, rdx
    mov eax, {ONE_THIRD}
    imul r11, rax
    shr r11, 46
    add r8, r11
    mov eax, {INVERSE_LN_2}
    imul r8, rax
    shr r8, 14
    inc ecx
    shl rcx, 56
    address rdx, {TABLES}
    sub rcx, [rdx + r9 * 8]
    sub rcx, r8
    jle 2f
    mov rax, rcx
    mul qword ptr [rsi + {D_MULTIPLIER}]
    cmp rax, 1
    sbb rdx, 0
    mov ecx, [rsi + {D_SHIFT}]
    sub ecx, 8
    shr rdx, cl
    lea rax, [rdx + 1]
    ret
2:  mov eax, 1
3:  ret

# -> r10: the thread's slot; carry flag: the shared one. Clobbers rax, r11.
.Lslot:
    mov rax, fs:[0]
    imul r10, rax, {HASH}
    address r11, {SLOTS}
    shr r10, {HASH_SHIFT}
    and r10d, {SLOTS_BYTES} - {SLOT_BYTES}
    add r10, r11
    cmp [r10], rax
    jne .Lclaim
    ret

# rax: thread pointer, r10: the first slot to try, r11: the slots -> as above. Keeps all other registers.
.p2align 4, 0x90
.Lclaim:
    push rcx
    push rdx
    mov rdx, rax
    mov ecx, 32
1:  mov rax, [r10]
    cmp rax, rdx
    je 3f
    test rax, rax
    jnz 2f
    lock cmpxchg [r10], rdx
    jne 1b
    jmp 3f
2:  add r10, {SLOT_BYTES}
    sub r10, r11
    and r10d, {SLOTS_BYTES} - 1
    add r10, r11
    dec ecx
    jnz 1b
    address r10, {STATE}
    lock inc qword ptr [r10 + {T_SLOTS_FULL}]
    address r10, {SHARED}
    stc
    jmp 4f
3:  clc
4:  pop rdx
    pop rcx
    ret

# Adds the block in rdi to the set; carry flag: there is no space. Keeps rdi, r10, r11.
.Linsert:
    window
    mov r9, r8
    mov ecx, {WINDOW}
1:  cmp [r8], rdi
    je 6f
    add r8, 8
    dec ecx
    jnz 1b
    mov r8, r9
    mov ecx, {WINDOW}
2:  cmp qword ptr [r8], 0
    jne 3f
    xor eax, eax
    lock cmpxchg [r8], rdi
    je 4f
3:  add r8, 8
    dec ecx
    jnz 2b
    address rcx, {STATE}
    lock inc qword ptr [rcx + {T_SET_FULL}]
    stc
    ret
4:  filter_byte
5:  movzx eax, byte ptr [r9]
    cmp eax, 255
    je 6f
    lea ecx, [rax + 1]
    lock cmpxchg [r9], cl
    jne 5b
6:  clc
    ret

# Removes the block in rdi from the set; carry flag: it was there. Keeps rdi, r10, r11.
.Lremove:
    test rdi, rdi
    jz 2f
    window
    mov ecx, {WINDOW}
1:  cmp [r8], rdi
    je 3f
    add r8, 8
    dec ecx
    jnz 1b
2:  clc
    ret
3:  mov rax, rdi
    xor ecx, ecx
    lock cmpxchg [r8], rcx
    jne 2b
    filter_byte
4:  movzx eax, byte ptr [r9]
    cmp eax, 255
    je 5f
    lea ecx, [rax - 1]
    lock cmpxchg [r9], cl
    jne 4b
5:  stc
    ret

.globl heapbpf_inline_code_end
.hidden heapbpf_inline_code_end
heapbpf_inline_code_end:

.p2align 2
.globl heapbpf_inline_entries
.hidden heapbpf_inline_entries
heapbpf_inline_entries:
    .long .Lallocation_ends_countdown - .Lcode
    .long .Lallocation - .Lcode
    .long .Lreallocation - .Lcode
    .long .Lfree - .Lcode
    .long .Lrefused - .Lcode
    .long .Lclaim - .Lcode
    .long .Ldraw - .Lcode
    .long .Lsite_result - .Lcode
    .long .Lsite_freeing - .Lcode
    .long .Lsite_reallocating - .Lcode
    .long .Lsite_unseen - .Lcode
    .long .Lframed - .Lcode
    .long .Lframed_end - .Lcode
.popsection
