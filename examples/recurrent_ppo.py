"""Recurrent PPO: a policy with an LSTM remembers which way to turn at the end of a corridor.

The cue is visible in the first cell only. Episodes end at different times, and the policy's state is reset there.

Shape legend: N environments, T steps of a rollout, O observations, H units, A actions.
"""

import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.distributions import Categorical

import stretto

OBSERVATIONS, UNITS, ACTIONS = 4, 64, 3  # observed: cue left, cue right, corridor, junction; actions: on, left, right


class Corridors:
    """Corridors of random length, stepped in parallel; the turn that the cue indicated earns 1, any other action -1."""

    def begin(self, new_N):
        """Start new episodes in some of the environments; returns the observations of all."""
        cue_N, left_N = torch.randint(2, new_N.shape), torch.randint(4, 12, new_N.shape)
        self.cue_N = cue_N if new_N.all() else torch.where(new_N, cue_N, self.cue_N)
        self.left_N = left_N if new_N.all() else torch.where(new_N, left_N, self.left_N)
        return torch.eye(OBSERVATIONS)[torch.where(new_N, self.cue_N, torch.where(self.left_N > 0, 2, 3))]

    def step(self, action_N):
        """Walk on, or turn at the junction, where the episode ends."""
        done_N, self.left_N = self.left_N == 0, self.left_N - 1
        return done_N * torch.where(action_N == 1 + self.cue_N, 1.0, -1.0), self.begin(done_N), done_N


class Policy(nn.Module):
    """An LSTM with a head for actions and one for the value."""

    def __init__(self):
        super().__init__()
        self.lstm, self.heads = nn.LSTM(OBSERVATIONS, UNITS, batch_first=True), nn.Linear(UNITS, ACTIONS + 1)

    def plain(self, seen_NTO, state, new_NT):
        """The usual recurrent PPO: one call per step, with the state set to zero where an episode begins."""
        outputs = []
        for t in range(seen_NTO.shape[1]):
            state = tuple(part * ~new_NT[None, :, t, None] for part in state)
            output, state = self.lstm(seen_NTO[:, t : t + 1], state)
            outputs.append(output)
        return self.heads(torch.cat(outputs, dim=1)), state

    def forward(self, seen_NTO, state, new_NT):
        """The same in one call of the accelerated layer, with `resets`."""
        output_NTH, state = self.lstm(seen_NTO, state, resets=new_NT)
        return self.heads(output_NTH), state


def main():
    """Compare both on the first rollout, then train."""
    quick = quick_was_asked(__doc__)
    torch.manual_seed(0)
    count, num_steps, rounds = (4, 16, 1) if quick else (16, 128, 40)
    policy, corridors = stretto.accelerate(Policy()), Corridors()  # the one line
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    state, new_N = (torch.zeros(1, count, UNITS), torch.zeros(1, count, UNITS)), torch.ones(count, dtype=torch.bool)
    seen_NO = corridors.begin(new_N)
    for number in range(rounds):
        start, steps = state, []
        for _ in range(num_steps):
            with torch.no_grad():
                output, state = policy(seen_NO[:, None], state, new_N[:, None])
            choice = Categorical(logits=output[:, 0, :ACTIONS])
            action_N, before = choice.sample(), (seen_NO, new_N, output[:, 0, -1])
            reward_N, seen_NO, new_N = corridors.step(action_N)
            steps.append((*before, action_N, choice.log_prob(action_N), reward_N, new_N))
        rollout = [torch.stack(part, dim=1) for part in zip(*steps, strict=True)]
        seen_NTO, new_NT, value_NT, action_NT, log_NT, reward_NT, done_NT = rollout
        given = (seen_NTO, start, new_NT)
        if number == 0:
            compare(lambda g=given: policy.plain(*g)[0], lambda g=given: policy(*g)[0], policy, quick=quick)
        gain_NT, next_N, total_N = torch.zeros_like(value_NT), value_NT[:, -1], torch.zeros(count)
        for t in reversed(range(num_steps)):  # generalised advantage estimation
            going_N = 0.95 * ~done_NT[:, t]
            total_N = reward_NT[:, t] + going_N * next_N - value_NT[:, t] + 0.9 * going_N * total_N
            gain_NT[:, t], next_N = total_N, value_NT[:, t]
        target_NT, gain_NT = gain_NT + value_NT, (gain_NT - gain_NT.mean()) / (gain_NT.std() + 1e-6)
        for _ in range(4):
            output_NTA, _ = policy(*given)
            choice = Categorical(logits=output_NTA[..., :ACTIONS])
            ratio_NT = (choice.log_prob(action_NT) - log_NT).exp()
            loss = -torch.minimum(ratio_NT * gain_NT, ratio_NT.clamp(0.8, 1.2) * gain_NT).mean()
            loss = loss + (output_NTA[..., -1] - target_NT).square().mean() - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if number % 8 == 7:
            print(f"round {number + 1:>2}  reward per episode {(reward_NT.sum() / done_NT.sum()).item():+.2f}")


if __name__ == "__main__":
    main()
