//! Why something is not hooked inline.

use thiserror::Error;

/// Why a function cannot be hooked inline. Each is one sentence that a user may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Fewer bytes than a jump has.
    #[error("its code is shorter than a jump")]
    TooShort,
    /// The decoder does not know the bytes.
    #[error("it begins with bytes that are no instruction that heapbpf knows")]
    UnknownInstruction,
    /// A call among the displaced instructions.
    #[error("it begins with a call, whose return address would be elsewhere")]
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
    #[error("its first instructions take too much space elsewhere")]
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
    #[error("it reads a register besides those of its arguments, as a variadic or a nested function does")]
    HiddenArgument,
    /// Its bytes overlap another function's, or it has the same address.
    #[error("its first bytes belong to another function too")]
    Overlaps,
}

/// Why a blob cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BuildError {
    /// More functions than stubs.
    #[error("the allocator has {0} functions, and inline hooks have room for {max}", max = crate::abi::MAX_FUNCTIONS)]
    TooManyFunctions(usize),
    /// The shared code does not fit.
    #[error("the blob's code has {0} bytes, which is more than the layout has room for")]
    CodeTooLong(usize),
    /// The size of the set is out of range.
    #[error("a set of 2^{0} sampled blocks is not possible")]
    SetSize(u32),
    /// A function of an object allocator cannot be hooked.
    #[error("a function of the object allocator: {0}")]
    Object(Refusal),
    /// No function can be hooked.
    #[error("none of the allocator's functions can be hooked inline")]
    NothingToHook,
}

/// Why memory of a target is not accepted as a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ForeignBlob {
    /// Fewer bytes than the structure has.
    #[error("its memory could not be read whole")]
    Truncated,
    /// The magic number is missing.
    #[error("it does not begin like a blob of heapbpf")]
    Magic,
    /// Made by another version of heapbpf.
    #[error("it was made by another version of heapbpf (layout {0})")]
    Version(u64),
    /// Made by another build, with other code.
    #[error("its code is that of another build of heapbpf")]
    OtherCode,
    /// A value makes no sense.
    #[error("its header makes no sense")]
    Nonsense,
}
