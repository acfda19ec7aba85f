//! The sampling criterion: what counts as a trial.

/// What counts as a sampling trial.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Criterion {
    /// One trial per byte requested (at least one per call).
    #[default]
    Bytes,
    /// One trial per allocation.
    Allocations,
    /// A number of trials per allocation that depends on its size class, so that each class has a sampling interval of
    /// its own.
    SizeClass,
}

impl Criterion {
    /// Every criterion, in the order in which the command line lists them.
    pub const ALL: [Self; 3] = [Self::Bytes, Self::Allocations, Self::SizeClass];

    /// Name of the criterion on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Allocations => "allocations",
            Self::SizeClass => "size-class",
        }
    }

    /// The criterion with this name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|criterion| criterion.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        assert_eq!(Criterion::ALL.map(|criterion| Criterion::from_name(criterion.name())), Criterion::ALL.map(Some));
        assert_eq!((Criterion::from_name("words"), Criterion::default().name()), (None, "bytes"));
    }
}
