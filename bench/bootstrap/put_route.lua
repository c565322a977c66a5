-- PUT /route of 50 ranks in turn, each time from another port: the engine has 51 ranks, so that it
-- stays incomplete and every request changes what is stored.
local threads = 0

function setup(thread)
  thread:set("offset", threads)
  threads = threads + 1
end

local body = '{"attn_tp_size": 51, "attn_tp_rank": %d, "attn_cp_size": 1, "attn_cp_rank": 0, '
  .. '"attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, '
  .. '"system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": %d, "page_size": 64, '
  .. '"kv_cache_dtype": "auto", "load_balance_method": "round_robin"}'
local sent = 0

function request()
  sent = sent + 1
  local rank = (sent * 2 + offset) % 50
  -- The port of a rank is another one in each round of the ranks.
  local port = 1024 + math.floor(sent / 25) % 60000
  return wrk.format("PUT", "/route", { ["Content-Type"] = "application/json" }, body:format(rank, port))
end
