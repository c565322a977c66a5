-- PUT /route of 50 ranks in turn, each time from another port: the engine has 51 ranks, so that it
-- stays incomplete and every request changes what is stored. The requests are made beforehand: the
-- load's own processor time is not to be what is measured.
local threads = 0

function setup(thread)
  thread:set("offset", threads)
  threads = threads + 1
end

local body = '{"attn_tp_size": 51, "attn_tp_rank": %d, "attn_cp_size": 1, "attn_cp_rank": 0, '
  .. '"attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, '
  .. '"system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": %d, "page_size": 64, '
  .. '"kv_cache_dtype": "auto", "load_balance_method": "round_robin"}'
-- Rounds of the ranks; the port of a rank is another one in each.
local ROUNDS = 64
local requests = {}
local sent = 0

function init()
  local headers = { ["Content-Type"] = "application/json" }
  for at = 0, 25 * ROUNDS - 1 do
    local rank = (at * 2 + offset) % 50
    local port = 1024 + math.floor(at / 25)
    requests[at] = wrk.format("PUT", "/route", headers, body:format(rank, port))
  end
end

function request()
  sent = sent + 1
  return requests[sent % (25 * ROUNDS)]
end
