//! Slots for requests in progress. Each token has its own, so that no token can use up those of the others.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A slot, for as long as anything of its request holds it.
pub type Slot = Arc<OwnedSemaphorePermit>;

/// Number of slots that each of `tokens` tokens gets out of `most`: an equal share, at least one.
pub fn places_of_each(most: usize, tokens: usize) -> usize {
    (most / tokens.max(1)).max(1)
}

/// Slots of one kind, by token.
pub struct Places {
    by_token: Box<[Arc<Semaphore>]>,
    /// Number of slots of each token.
    pub of_each: usize,
}

impl Places {
    /// Creates `most` slots, shared equally by this many tokens.
    pub fn new(most: usize, tokens: usize) -> Self {
        let of_each = places_of_each(most, tokens);
        Self { by_token: (0..tokens.max(1)).map(|_| Arc::new(Semaphore::new(of_each))).collect(), of_each }
    }

    /// Takes a slot, if the token has a free one.
    pub fn try_take(&self, token: usize) -> Option<Slot> {
        Arc::clone(self.by_token.get(token)?).try_acquire_owned().ok().map(Arc::new)
    }

    /// Waits for a slot of the token. Returns `None` if there is no such token.
    pub fn take(&self, token: usize) -> impl Future<Output = Option<Slot>> {
        let of_token = self.by_token.get(token).cloned();
        // The semaphores are never closed.
        async move { of_token?.acquire_owned().await.ok().map(Arc::new) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_token_takes_the_others_keep() {
        let places = Places::new(9, 4);
        assert_eq!(places.of_each, 2);
        let taken: Vec<_> = (0..3).map(|_| places.try_take(0)).collect();
        assert!(taken[0].is_some() && taken[1].is_some() && taken[2].is_none());
        assert!(places.try_take(3).is_some() && places.try_take(4).is_none());
        drop(taken);
        assert!(places.try_take(0).is_some());
        assert_eq!(Places::new(2, 5).of_each, 1, "nobody is shut out");
    }
}
