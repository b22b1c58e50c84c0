"""Recurrent, convolutional and attending models of sequences of tokens."""

from __future__ import annotations

from typing import Any

from bench.programs._shared import Step, module, training


def lstm(torch: Any) -> Step:
    nn = torch.nn
    embed, rnn, head = nn.Embedding(20000, 512), nn.LSTM(512, 512, 2), nn.Linear(512, 20000)
    model = nn.ModuleList([embed, rnn, head]).cuda()
    tokens = torch.randint(20000, (128, 32), device="cuda")

    def loss_of(model: Any) -> Any:
        hidden, _state = model[1](model[0](tokens))
        return nn.functional.cross_entropy(model[2](hidden).flatten(0, 1), tokens.flatten())

    return training(torch, model, loss_of)


def encoder_scaled(torch: Any) -> Step:
    """Half precision, a scaler, gradients that are clipped, two micro-batches a step."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(768, 10)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
    x, y = torch.randn(8, 256, 768, device="cuda"), torch.randint(10, (8,), device="cuda")

    def step() -> None:
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(x).mean(1), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def gru_remembers(torch: Any) -> Step:
    """The state goes on from step to step. Embedding and head share a weight."""
    nn = torch.nn
    embed, rnn = nn.Embedding(16000, 512), nn.GRU(512, 512, 2, dropout=0.2)
    model = module(torch, lambda self, x, h: self.rnn(self.embed(x), h), embed=embed, rnn=rnn)
    tokens = torch.randint(16000, (65, 48), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = torch.zeros(2, 48, 512, device="cuda")

    def step() -> None:
        nonlocal state
        hidden, state = model(tokens[:-1], state.detach())
        logits = hidden @ embed.weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tagger(torch: Any) -> Step:
    """Reads sentences of unlike lengths, packed, in both directions."""
    nn = torch.nn
    embed, head = nn.Embedding(40000, 200, padding_idx=0), nn.Linear(512, 17)
    rnn = nn.LSTM(200, 256, 2, batch_first=True, bidirectional=True, dropout=0.3)
    lengths = torch.arange(80, 16, -1)
    words = torch.randint(1, 40000, (64, 80), device="cuda")
    tags = torch.randint(17, (64, 80), device="cuda")
    blank = torch.arange(80, device="cuda") >= lengths.cuda()[:, None]
    words, tags = words.masked_fill(blank, 0), tags.masked_fill(blank, -100)

    def forward(self: Any, words: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True)
        read, _state = self.rnn(packed)
        return self.head(nn.utils.rnn.pad_packed_sequence(read, batch_first=True)[0])

    model = module(torch, forward, embed=embed, rnn=rnn, head=head)
    loss = nn.functional.cross_entropy
    adam = {"optimizer": torch.optim.Adam, "lr": 2e-3}
    return training(torch, model, lambda m: loss(m(words).mT, tags), **adam)


def translator(torch: Any) -> Step:
    """A decoder of one cell that attends to what the encoder read, word by word."""
    nn = torch.nn
    parts = {
        "embed": nn.Embedding(12000, 256),
        "encoder": nn.GRU(256, 256, bidirectional=True, batch_first=True),
        "cell": nn.GRUCell(256 + 512, 512),
        "query": nn.Linear(512, 256),
        "key": nn.Linear(512, 256),
        "score": nn.Linear(256, 1),
        "head": nn.Linear(1024, 12000),
    }
    texts = torch.randint(12000, (64, 40), device="cuda")
    answers = torch.randint(12000, (64, 32), device="cuda")

    def forward(self: Any, texts: Any, answers: Any) -> Any:
        read, last = self.encoder(self.embed(texts))
        state, keys, said = last.transpose(0, 1).flatten(1), self.key(read), []
        for word in self.embed(answers).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state)[:, None]))
            seen = (scores.softmax(1) * read).sum(1)
            state = self.cell(torch.cat([word, seen], 1), state)
            said.append(torch.cat([state, seen], 1))
        return self.head(torch.stack(said, 1))

    def loss_of(model: Any) -> Any:
        logits = model(texts, answers[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), answers[:, 1:].flatten())

    return training(torch, module(torch, forward, **parts), loss_of, optimizer=torch.optim.Adam)


def text_cnn(torch: Any) -> Step:
    """Convolutions over words, three to five at a time, and the greatest of each."""
    nn = torch.nn
    convs = nn.ModuleList(nn.Conv1d(300, 256, width) for width in (3, 4, 5))
    embed = nn.Embedding(50000, 300)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(768, 20))
    words = torch.randint(50000, (256, 200), device="cuda")
    topics = torch.randint(20, (256,), device="cuda")

    def forward(self: Any, words: Any) -> Any:
        x = self.embed(words).mT
        found = [torch.relu(conv(x)).amax(-1) for conv in self.convs]
        return self.head(torch.cat(found, 1))

    model = module(torch, forward, embed=embed, convs=convs, head=head)
    loss = nn.functional.cross_entropy
    adagrad = {"optimizer": torch.optim.Adagrad, "lr": 0.01}
    return training(torch, model, lambda m: loss(m(words), topics), **adagrad)
