//! The rules, case by case.

use super::*;
use serde_json::json;

/// The registration of one rank of a tensor-parallel engine.
pub(crate) fn registration(tp_size: u32, tp_rank: u32, port: u16, page_size: u32) -> Command {
    let body = json!({
        "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
        "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": port, "page_size": page_size,
        "kv_cache_dtype": "auto", "load_balance_method": "round_robin",
    });
    let registration = Registration::parse(body.as_object().unwrap(), true, 7).unwrap();
    Command::PutRank(Box::new(registration))
}

fn put(
    state: &mut State,
    tp_size: u32,
    tp_rank: u32,
    port: u16,
    page: u32,
) -> Result<Applied, Refused> {
    state.apply("e", &registration(tp_size, tp_rank, port, page), 7)
}

fn number(state: &State) -> u64 {
    state.namespaces["e"]
        .generation_opt
        .as_ref()
        .unwrap()
        .number
}

#[test]
fn one_rank_twice_is_one_rank() {
    let mut state = State::default();
    put(&mut state, 2, 0, 10, 64).unwrap();
    let again = put(&mut state, 2, 0, 10, 64).unwrap();
    assert_eq!(again.changed, []);
    assert_eq!(again.before, again.after);
    put(&mut state, 2, 0, 11, 64).unwrap();
    assert!(
        !state.namespaces["e"].is_complete(),
        "an incomplete generation takes a new address"
    );
    assert_eq!(number(&state), 1);
    assert_eq!(
        state.namespaces["e"].missing(9),
        [RankId {
            dp: 0,
            cp: 0,
            tp: 1,
            pp: 0
        }]
    );
    put(&mut state, 2, 1, 12, 64).unwrap();
    assert!(state.namespaces["e"].is_complete());
}

#[test]
fn a_replaced_engine_begins_a_generation_and_its_past_is_refused() {
    let mut state = State::default();
    put(&mut state, 2, 0, 10, 64).unwrap();
    put(&mut state, 2, 1, 11, 64).unwrap();
    let applied = put(&mut state, 2, 0, 20, 64).unwrap();
    assert!(applied.began_generation && number(&state) == 2);
    assert_eq!(
        state.namespaces["e"].ranks.len(),
        1,
        "the new generation starts empty"
    );
    assert!(matches!(
        put(&mut state, 2, 1, 11, 64),
        Err(Refused::Retired(_))
    ));
    put(&mut state, 2, 1, 21, 64).unwrap();
    assert!(state.namespaces["e"].is_complete());
}

#[test]
fn fixed_ports_may_come_back_with_another_shape() {
    let mut state = State::default();
    put(&mut state, 2, 0, 10, 64).unwrap();
    put(&mut state, 2, 1, 11, 64).unwrap();
    assert!(put(&mut state, 2, 0, 10, 32).unwrap().began_generation);
    put(&mut state, 2, 1, 11, 32).unwrap();
    assert!(state.namespaces["e"].is_complete());
    assert!(matches!(
        put(&mut state, 2, 1, 11, 64),
        Err(Refused::Retired(_)) | Ok(_)
    ));
}

#[test]
fn it_is_known_since_when_ranks_are_missing() {
    let mut state = State::default();
    let since = |state: &State| state.namespaces["e"].incomplete_since();
    put(&mut state, 2, 0, 10, 64).unwrap();
    let generation = state.namespaces["e"].generation_opt.clone().unwrap();
    assert_eq!(since(&state), Some(generation.began_at));
    put(&mut state, 2, 1, 11, 64).unwrap();
    assert_eq!(since(&state), None);
    let id = *state.namespaces["e"].ranks.keys().next().unwrap();
    let removal = Command::DeleteRank(id);
    let removed_at = generation.began_at + 100;
    state.apply("e", &removal, removed_at).unwrap();
    assert_eq!(since(&state), Some(removed_at));
}
