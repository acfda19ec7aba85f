//! ABI types as keys and values of aya's typed maps.

use zerocopy::{FromBytes, IntoBytes};

/// Wraps an ABI type so that it can be a key or value of aya's typed maps.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abi<T>(pub T);

// SAFETY: aya copies such values to and from buffers of `size_of::<T>()` bytes, after checking that this is the map's
// key or value size. The wrapper has the layout of `T`. Any bytes are a valid `T` (`FromBytes`), and all bytes of a `T`
// are initialised (`IntoBytes`).
unsafe impl<T: FromBytes + IntoBytes + Copy + 'static> aya::Pod for Abi<T> {}
