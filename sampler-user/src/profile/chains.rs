//! Stacks as chains of names with one whole number each: what flame graphs are made of.

use std::collections::HashMap;

use super::formats::{FormatError, WriteOptions};
use super::intern::Interned;
use super::model::Profile;
use super::naming::frame_name;
use super::round::largest_remainder;

/// Distinct chains of names with their values.
#[derive(Debug, Default)]
pub struct Chains {
    /// Distinct names.
    pub names: Vec<String>,
    /// Chains as indices into `names`, outermost first, with the rounded value (never 0).
    pub chains: Vec<(Box<[u32]>, i64)>,
}

impl Chains {
    /// The chains of a profile for the value and grouping of `options`. Their values add up to the rounded total.
    pub fn new(profile: &Profile, options: &WriteOptions) -> Result<Self, FormatError> {
        let (value, group_by) = (options.value_of(profile)?, options.group_of(profile));
        let interned = Interned::new(profile);
        let mut names = Names::default();
        let name_of_frame: Vec<u32> =
            interned.frames.iter().map(|frame| names.id(&frame_name(profile, frame))).collect();
        let mut sums: Vec<f64> = Vec::new();
        let mut chains: Vec<Box<[u32]>> = Vec::new();
        let mut known: HashMap<Box<[u32]>, usize> = HashMap::new();
        let mut chain = Vec::new();
        for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
            chain.clear();
            let group = group_by.key(profile, row);
            if !group.is_empty() {
                chain.push(names.id(&group));
            }
            if interned.stacks[stack as usize].stack.cut.is_some() {
                chain.push(names.id("[incomplete]"));
            }
            chain.extend(interned.frame_ids(stack).iter().rev().map(|&frame| name_of_frame[frame as usize]));
            if chain.is_empty() {
                chain.push(names.id("[no stack]"));
            }
            let index = match known.get(chain.as_slice()) {
                Some(&index) => index,
                None => {
                    known.insert(chain.as_slice().into(), sums.len());
                    chains.push(chain.as_slice().into());
                    sums.push(0.0);
                    sums.len() - 1
                }
            };
            sums[index] += value.of(row);
        }
        let chains = chains.into_iter().zip(largest_remainder(&sums)).filter(|&(_, value)| value != 0).collect();
        Ok(Self { names: names.table, chains })
    }

    /// The sum of all values.
    pub fn total(&self) -> i64 {
        self.chains.iter().fold(0, |sum, (_, value)| sum.saturating_add(*value))
    }
}

#[derive(Default)]
struct Names {
    table: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Names {
    fn id(&mut self, name: &str) -> u32 {
        if let Some(&id) = self.ids.get(name) {
            return id;
        }
        let id = self.table.len() as u32;
        self.table.push(name.to_owned());
        self.ids.insert(name.to_owned(), id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::group::GroupBy;
    use crate::profile::testing;
    use crate::profile::value::Value;

    fn text(chains: &Chains) -> Vec<String> {
        let name = |&id: &u32| chains.names[id as usize].as_str();
        chains.chains.iter().map(|(chain, _)| chain.iter().map(name).collect::<Vec<_>>().join(";")).collect()
    }

    #[test]
    fn chains_begin_with_the_group_and_end_with_the_innermost_call() {
        let profile = testing::small();
        let chains = Chains::new(&profile, &WriteOptions::default()).expect("live");
        let expected = "server (4242);main;handle(Request const&);parse_value;parse_value;parse_value;grow";
        assert_eq!(text(&chains)[0], expected);
        assert!(text(&chains).iter().any(|chain| chain.contains("[incomplete];handle")));
    }

    #[test]
    fn values_add_up_for_every_value_and_grouping() {
        let profile = testing::small();
        for value in Value::ALL {
            for group_by in GroupBy::ALL {
                let options = WriteOptions { value: Some(value), group_by: Some(group_by), ..WriteOptions::default() };
                let chains = Chains::new(&profile, &options).expect("live");
                let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
                assert_eq!(chains.total(), total.round() as i64);
            }
        }
    }

    #[test]
    fn in_use_values_need_frees() {
        let mut profile = testing::small();
        profile.live = false;
        let options = WriteOptions { value: Some(Value::InuseSpace), ..WriteOptions::default() };
        assert!(matches!(Chains::new(&profile, &options), Err(FormatError::NotLive("inuse_space"))));
        assert!(Chains::new(&profile, &WriteOptions::default()).is_ok());
    }
}
