//! Why something is not hooked inline.

use thiserror::Error;

/// Why a function cannot be hooked inline. Each is one sentence that a user may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Fewer bytes than a jump has.
    #[error("its code is shorter than a jump")]
    TooShort,
    /// The decoder does not know the bytes.
    #[error("it begins with an instruction that heapbpf does not know")]
    UnknownInstruction,
    /// A call among the displaced instructions.
    #[error("it begins with a call, whose return address would change")]
    Call,
    /// A branch that has no form with a long distance, or that leads nowhere known.
    #[error("it begins with a branch that cannot be moved")]
    Branch,
    /// An instruction that only works where it is, or raises an exception.
    #[error("it begins with an instruction that cannot be moved")]
    Immovable,
    /// A jump leads between the first instruction and the end of what is displaced.
    #[error("a jump leads into its first instructions")]
    JumpedInto,
    /// The displaced instructions refer to something that is out of reach from the blob.
    #[error("its first instructions refer to something that is too far away")]
    OutOfReach,
    /// The displaced instructions are too long for a stub.
    #[error("the copy of its first instructions would be too long")]
    TooLong,
    /// The allocator's own code reaches the function by a short jump; such calls would count twice.
    #[error("the allocator's own code reaches it by a jump that is too short to be redirected")]
    ShortInnerJump,
    /// A reallocation that may throw and has no twin that returns NULL instead: it would be unknown whether the old
    /// block is freed.
    #[error("it reallocates, and may throw an exception")]
    ThrowingReallocation,
    /// It reads a register that is not preserved until it runs: rax holds the number of vector registers of a variadic
    /// call (System V ABI 3.2.3), r10 the frame around a nested function.
    #[error("it reads registers other than those of its arguments, as variadic and nested functions do")]
    HiddenArgument,
    /// Its bytes overlap another function's, or it has the same address.
    #[error("its first bytes also belong to another function")]
    Overlaps,
}

/// Why a blob cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BuildError {
    /// More functions than stubs.
    #[error("the allocator has {0} functions, and inline hooks have space for {max}", max = crate::abi::MAX_FUNCTIONS)]
    TooManyFunctions(usize),
    /// The shared code does not fit.
    #[error("the blob's code has {0} bytes, which is more than the layout has space for")]
    CodeTooLong(usize),
    /// The size of the set is out of range.
    #[error("a set of 2^{0} sampled blocks is not possible")]
    SetSize(u32),
    /// A function of an object allocator cannot be hooked.
    #[error("a function of the object allocator: {0}")]
    Object(Refusal),
    /// No function can be hooked.
    #[error("none of the allocator's functions can get an inline hook")]
    NothingToHook,
}

/// Why memory of a target is not accepted as a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ForeignBlob {
    /// Fewer bytes than the structure has.
    #[error("the memory cannot be read completely")]
    Truncated,
    /// The magic number is missing.
    #[error("the memory does not begin like heapbpf's hook code")]
    Magic,
    /// Made by another version of heapbpf.
    #[error("the code is from another version of heapbpf (layout {0})")]
    Version(u64),
    /// Made by another build, with other code.
    #[error("the code is from another build of heapbpf")]
    OtherCode,
    /// A value makes no sense.
    #[error("the header is invalid")]
    Nonsense,
}
