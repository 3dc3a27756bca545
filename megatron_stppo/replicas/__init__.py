"""Asynchronous training.

Who sends what to whom. First ranks exchange messages; all ranks exchange weights.

    trainer                                       replica, one of many
    +-----------------------------------+         +-----------------------------------+
    | the loop, on all ranks            |         | Replica --> Player, Engine        |
    |   | draw, play, publish           |         |   ^  on all ranks                 |
    | Served --Step--> all ranks        |         |   | News, broadcast               |
    |   | admit, batch, announce        |         | NewsSource <-- EnvironmentHost    |
    | Hub (a thread) --> Crew, Ledger   |         |   |            answers            |
    |   |                               |         |   |                               |
    | Listener <-------------------- messages -------> Dialer                         |
    |                                   |         |                                   |
    | Sender (a thread) --> Link ----- weights -----> Link -----> Links of two others |
    +-----------------------------------+         +-----------------------------------+

    a replica    the trainer sends                the replica sends
    joins        Receive, or Stop: refused        Hello, then Moved
    plays        Play                             Done, one per episode
    is updated   Announce, then Receive           Ready, then Moved
    passes on    Give                             Moved
    is saved     TellUnfinished                   Unfinished, one per episode; ToldUnfinished
    leaves       Stop                             or on its own: Unfinished, ReplicaEnds

The way of an episode, from its last token to a batch:

    Replica._report                    sends a Done, with the trajectory
    Dialer.send, Channel               pack it (wire/episodes.py), and send it with a code
    Channel, Mailbox, Listener.take    check the code, unpack it, or expel the replica
    Crew.take, Crew._done              check that the replica was given it, and can have played it (Expected)
    EpisodeLedger.finish               stores the trajectory; a Ledger (data/ledger.py) completes its group
    Served.draw, EpisodeLedger.batch   take the groups of a batch

Who waits for whom. T is serving.timeout: a side that is silent for so long is lost to the other one.

    who                            waits for                                   at most
    Served.draw, Served.play       the episodes of a batch or an evaluation    10 T without any replica
    Served.publish                 replicas that lack the version before, and  T per transfer, else as draw
                                   with update=complete the admitted episodes
    Served.episodes                records of episodes in progress             10 s
    Served.close                   transfers in progress                       T per transfer
    other ranks of the trainer     the Step of the first rank                  as the first rank
    Sender's thread                the replica that it sends to                T
    Hub's thread                   a message of any replica                    0.2 s
    NewsSource.next, idle          a message, or an answer                     0.5 s, and again
    NewsSource.next, with          the answers of all environments             environment.deadline
      overlap_tools=false
    Dialer.send                    a trainer that does not read                while 256 MiB are unsent
    other ranks of a replica       the News of the first rank                  as the first rank
    Link, at both ends             the ranks of the other end                  T, or until the trainer says
                                                                               that they are lost
"""
